"""The Triton kernels in Triton's interpreter, but for those that the objective's gradient takes."""

import pytest
from interpreter import BACKWARD, FOLDER, NEEDS_TRITON, interpreted

pytestmark = NEEDS_TRITON


def test_the_kernels_keep_their_promises_in_the_interpreter(tmp_path, record_property):
    others = [f"--ignore={file}" for file in BACKWARD]
    record_property("passed", interpreted(tmp_path, FOLDER, *others))


@pytest.mark.slow
def test_further_cases_in_the_interpreter(tmp_path, record_property):
    record_property("passed", interpreted(tmp_path, FOLDER, "-m", "slow"))
