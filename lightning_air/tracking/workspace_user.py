"""Ask the Databricks workspace who runs this: no variable of the platform's own tells."""

_PROFILE_URI = "databricks://"


def ask_workspace_user(tracking_uri: str, *, timeout_seconds: float = 10.0) -> str | None:
    """Return the user's name in the workspace, an e-mail for people; None if it cannot be had.

    One request, with the credentials that MLflow uses. MLflow installs the SDK.

    Args:
        tracking_uri: "databricks", or "databricks://<profile>".
        timeout_seconds: For all tries together.
    """
    from databricks.sdk import WorkspaceClient  # noqa: PLC0415 - takes a second, which most runs need not spend
    from databricks.sdk.core import Config  # noqa: PLC0415

    profile = tracking_uri.removeprefix(_PROFILE_URI) if tracking_uri.startswith(_PROFILE_URI) else None
    try:
        config = Config(
            profile=profile,
            http_timeout_seconds=timeout_seconds,
            retry_timeout_seconds=int(timeout_seconds),
        )
        return WorkspaceClient(config=config).current_user.me().user_name
    except Exception:  # noqa: BLE001 - no credentials, no network, no such user: the caller says what to do
        return None
