"""Numbers as users read them."""

import pytest

from unigrad_fast.runtime.wording import byte_size


@pytest.mark.parametrize(
    "size, text",
    [
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (999.4 * 2**10, "999 KiB"),
        (999.6 * 2**10, "1000 KiB"),
        (2**20 - 1, "1024 KiB"),
        (3.456 * 2**30, "3.46 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_have_no_exponent(size, text):
    assert byte_size(size) == text
