"""Draws Vega-Lite specifications on the server, and makes the script that draws them in a browser.

vl_convert carries a JavaScript engine (about 2 s for its first use), so it is imported by the first chart only.
"""

import json
from functools import lru_cache
from importlib.metadata import version

from dashboards.charts import Spec

BUNDLE_VERSION = version("vl-convert-python")


def svg(spec: Spec) -> str:
    """The chart as an SVG document."""
    return _svg(json.dumps(spec))


def png(spec: Spec) -> bytes:
    """The chart as a PNG image at twice its nominal size."""
    return _png(json.dumps(spec))


@lru_cache(maxsize=64)
def _svg(spec: str) -> str:
    import vl_convert  # noqa: PLC0415

    return str(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))


@lru_cache(maxsize=16)
def _png(spec: str) -> bytes:
    import vl_convert  # noqa: PLC0415

    return bytes(vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[]))


@lru_cache(maxsize=1)
def browser_bundle() -> bytes:
    """Vega, Vega-Lite and vega-embed as one script that sets `window.vegaEmbed`."""
    import vl_convert  # noqa: PLC0415

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).encode()
