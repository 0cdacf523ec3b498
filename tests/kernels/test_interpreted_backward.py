"""The kernels that the objective's gradient takes, and the objective with them, in Triton's interpreter."""

from interpreter import BACKWARD, NEEDS_TRITON, interpreted

pytestmark = NEEDS_TRITON


def test_the_kernels_of_the_gradient_keep_their_promises_in_the_interpreter(tmp_path, record_property):
    record_property("passed", interpreted(tmp_path, *BACKWARD))
