"""The files of deploy/: the dashboard asks for metrics that exist, the unit for options that do."""

import configparser
import json
import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from swiftjax.cli import app
from tests.serving.http.harness import HttpService, run

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SUFFIXES = r"_(bucket|sum|count|total)$"


def test_dashboard_asks_for_metrics_that_exist() -> None:
    text = (DEPLOY / "grafana.json").read_text()
    asked = set(re.findall(r"swiftjax_[a-z_]+", text))
    assert len(json.loads(text)["panels"]) == 10 and len(asked) > 12

    async def body(service: HttpService) -> None:
        await service.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        told = (await service.client.get("/metrics")).text
        families = {re.sub(SUFFIXES, "", name) for name in re.findall(r"# TYPE (\S+)", told)}
        assert {re.sub(SUFFIXES, "", name) for name in asked} <= families

    run(body)


def test_unit_starts_a_command_that_exists() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "swiftjax.service")
    program, command, *words = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "swiftjax" and command == "serve"
    serve: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {name for param in serve.params for name in param.opts}
    options = {word for word in words if word.startswith("--")}
    assert options and options <= known
