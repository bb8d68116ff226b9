"""/docs: the routes of this server as one plain page, written from its OpenAPI description.

No script, and nothing from another server: it works without the internet, and under a strict content policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow:auto;padding:.5rem;border:1px solid #8888}"
    "h2{margin-top:2rem}summary{cursor:pointer}"
)


def docs_routes(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return HTMLResponse("\n".join(_page(app.openapi())), headers=headers)

    return router


def _page(description: dict[str, Any]) -> Iterator[str]:
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style><h1>{title}</h1>'
    yield '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>'
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            yield f"<p>{escape(route.get('summary', ''))}</p>"
            if "requestBody" in route:
                schema = route["requestBody"]["content"]["application/json"]["schema"]
                yield f"<details><summary>body</summary>{_pre(_resolved(schema, description))}</details>"
    yield f"<h2>Shapes</h2>{_pre(description.get('components', {}).get('schemas', {}))}</html>"


def _resolved(schema: dict[str, Any], description: dict[str, Any]) -> Any:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return description.get("components", {}).get("schemas", {}).get(name, schema)


def _pre(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"
