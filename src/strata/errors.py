"""One error tree. Status (HTTP) and exit code (CLI) are class attributes; the web and the CLI read them.

Every message names the field, flag or file at fault and the remedy. Expected outcomes (a miss, a refused park, a
damaged segment) are values, not exceptions.
"""

from __future__ import annotations


class StrataError(Exception):
    """Root of every error Strata raises on purpose."""

    status = 500
    exit_code = 1
    code = "internal_error"  # machine-readable, sent to HTTP clients

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def param(self) -> str | None:
        """The part of the client's request at fault."""
        return self.field


class ConfigError(StrataError):
    """A flag, environment variable or config key is unknown, out of range or contradicts another."""

    exit_code = 2
    code = "config_error"


class ModelError(StrataError):
    """The model file is missing, damaged or cannot be loaded."""

    status = 503
    code = "model_error"


class BadRequest(StrataError):
    """The client's request is malformed; `field` names the culprit."""

    status = 400
    code = "invalid_request_error"


class ContextOverflow(BadRequest):
    """The prompt does not fit the slot's context; the message carries both numbers."""

    code = "context_length_exceeded"


class SessionRefused(BadRequest):
    """A session file is damaged, of another model or K/V layout, or too long for this server; the message says why."""

    code = "session_refused"

    @property
    def param(self) -> str:
        return "filename"


class Unauthorized(StrataError):
    """No API key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(StrataError):
    """A page of another site, a host name that is not this server's, or a slot that another API key uses."""

    status = 403
    code = "forbidden"


class NotFound(StrataError):
    """No such route, model, slot or session."""

    status = 404
    code = "not_found"


class MethodNotAllowed(StrataError):
    """The route exists, but not for this HTTP method."""

    status = 405
    code = "method_not_allowed"


class BodyTooLarge(StrataError):
    """The request's body is larger than this server takes."""

    status = 413
    code = "request_too_large"


class NotJson(StrataError):
    """The request's body is not sent as application/json."""

    status = 415
    code = "unsupported_media_type"


class NotSupported(StrataError):
    """What was asked for is switched off, or this model cannot do it."""

    status = 501
    code = "not_supported"


class NoMemory(StrataError):
    """Physical memory does not admit it now (the floors of the conversation cache); it can be sent again."""

    status = 503
    code = "insufficient_memory"


class DiskRefused(StrataError):
    """The disk is full, would be too full, or failed; nothing was left behind."""

    status = 507
    code = "insufficient_storage"


class ServerLoading(StrataError):
    """The server has just been started and loads its model; the message says how far it is."""

    status = 503
    code = "loading"


class ServerStopping(StrataError):
    """The server was told to end; what it could not finish in time is given up."""

    status = 503
    code = "stopping"


class Unavailable(StrataError):
    """What was asked is whether something is ready (the engine, an idle slot), and it is not."""

    status = 503
    code = "unavailable"


class EngineGone(StrataError):
    """The engine process died or is restarting; the request can be sent again."""

    status = 503
    code = "engine_restarting"


class EngineRefused(StrataError):
    """The engine could not do what was asked of a sequence (decode failed, state refused)."""

    status = 500
    code = "engine_error"


class RunError(EngineRefused):
    """A running request ended with an engine error; the slot still holds `held` positions."""

    def __init__(self, message: str, *, held: int) -> None:
        super().__init__(message)
        self.held = held


class Busy(StrataError):
    """Too many requests wait already."""

    status = 429
    code = "busy"


class WaitedTooLong(StrataError):
    """No slot became idle within --queue-timeout-s; it can be sent again."""

    status = 503
    code = "queue_timeout"


class LevelError(StrataError):
    """A level's directory cannot be used: not writable, a file, a symlink, locked by another process."""

    code = "level_error"


class DamagedFile(StrataError):
    """A stored file failed validation; raised inside store/, turned into an outcome at its door."""

    code = "damaged_file"
