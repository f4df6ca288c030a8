"""LightningCLI 2.6 calls methods that newer versions of jsonargparse deprecate; all other warnings stay errors."""

import pytest


@pytest.fixture(autouse=True)
def _no_deprecations_between_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
