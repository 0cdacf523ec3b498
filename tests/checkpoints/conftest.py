from collections.abc import Iterator

import pytest
from thin import thin


@pytest.fixture(scope="module", autouse=True)
def _small_files() -> Iterator[None]:
    """Weights are written and read in nearly every test; ResNet-50 is what it is."""
    with thin(blocks=2):
        yield
