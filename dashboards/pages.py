"""Turns a template and its view model into a response. Autoescape is on: what a commit says stays text."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from dashboards import formats
from dashboards.assets import edition

if TYPE_CHECKING:
    from jinja2 import Environment


def page(
    request: Request, template: str, *, status: int = 200, headers: dict[str, str] | None = None, **context: Any
) -> HTMLResponse:
    """Render a template. Pages are never stored by caches: they show what is true now."""

    def address(route: str, /, **parameters: Any) -> str:
        return path_for(request, route, **parameters)

    def asset(name: str) -> str:
        return path_for(request, "asset", edition=edition(name), name=name)

    html = _environment().get_template(template).render(address=address, asset=asset, **context)
    return HTMLResponse(html, status_code=status, headers={"Cache-Control": "no-store"} | (headers or {}))


def path_for(request: Request, route: str, /, **parameters: Any) -> str:
    """The path of a page of ours, wherever the app is mounted."""
    return str(request.scope.get("root_path", "")) + str(request.app.url_path_for(route, **parameters))


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        loader=PackageLoader("dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(formats, name) for name in ("instant", "minute", "short", "plural", "state", "ci", "quantity")
    }
    return environment
