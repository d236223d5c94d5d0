"""Fixtures of tests with jax."""

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["32 bits", "64 bits"])
def word(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with jax as it is, and once more with 64-bit types, which ``jax_enable_x64`` switches on."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", before or request.param == "64 bits")
    yield
    jax.config.update("jax_enable_x64", before)
