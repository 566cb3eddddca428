"""The runner's settings: defaults, the environment, and the name it gives itself."""

import pytest
from pydantic import SecretStr, ValidationError

from runners.settings import RunnerSettings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RunnerSettings.model_fields:
        monkeypatch.delenv(f"ULPWATCH_{name.upper()}", raising=False)


def test_the_environment_sets_what_the_defaults_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULPWATCH_URL", "https://ulpwatch.test")
    monkeypatch.setenv("ULPWATCH_TOKEN", "s3cret")
    settings = RunnerSettings()
    assert (settings.url, settings.token.get_secret_value()) == ("https://ulpwatch.test", "s3cret")
    assert settings.device == "cpu"


def test_the_token_is_not_shown() -> None:
    assert "s3cret" not in repr(RunnerSettings(token=SecretStr("s3cret")))


def test_a_runner_without_a_name_is_called_after_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu box_1.local")
    assert RunnerSettings(device="cuda:1").runner_name == "gpu-box_1.local-cuda-1"
    assert RunnerSettings(name="mine").runner_name == "mine"


def test_a_name_is_made_to_fit_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "-" * 80)
    assert RunnerSettings().runner_name == "cpu"


def test_the_device_class_is_the_device_without_its_number() -> None:
    assert [RunnerSettings(device=device).device_class for device in ("cpu", "cuda", "cuda:3")] == [
        "cpu",
        "cuda",
        "cuda",
    ]


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="device"):
        RunnerSettings(device="tpu:0")


def test_every_setting_has_a_help_line() -> None:
    assert all(field.description for field in RunnerSettings.model_fields.values())
