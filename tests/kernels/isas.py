"""Running one test under every instruction set that this processor has."""

from collections.abc import Iterator

import pytest

from etserve.kernels import native

ISAS: list[str] = native.module().available_isas() if native.is_available() else []


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Switch to the instruction set, and back afterwards."""
    before = native.isa()
    native.module().use_isa(request.param)
    yield request.param
    native.module().use_isa(before)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(1)
