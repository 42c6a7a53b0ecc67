"""`swiftjax doctor`: what is installed, what SwiftJAX will use, what is wrong and how to fix it."""

import json

import typer

from swiftjax.cli.diagnosis import Report, diagnose
from swiftjax.cli.options import Json


def doctor(as_json: Json = False) -> None:
    """Look at this machine and say what would keep SwiftJAX from running well.

    Ends with 1 when something needs to be fixed.
    """
    report = diagnose()
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    if report["problems"]:
        raise typer.Exit(1)


def _lines(report: Report) -> list[str]:
    gpus = [f"{g['name']}, {g['memory_mib']} MiB ({g['used_mib']} in use)" for g in report["gpus"]]
    devices = [
        f"{d['platform']} {d['kind']}" + (f", {d['memory_mib']} MiB" if d["memory_mib"] else "")
        for d in report["devices"]
    ]
    rows = [
        *((name, version or "not installed") for name, version in report["versions"].items()),
        ("driver", report["driver"] or "no NVIDIA driver"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("jax devices", "; ".join(devices) or "none"),
        ("attention", report["implementation"] or "cannot be chosen"),
        ("available", " ".join(report["implementations"])),
        ("models", " ".join(report["families"])),
        ("rope kinds", " ".join(report["rope_kinds"])),
    ]
    lines = [f"{name:12} {value}" for name, value in rows]
    for problem in report["problems"]:
        lines += ["", f"PROBLEM      {problem['what']}", f"fix          {problem['fix']}"]
    return lines if report["problems"] else [*lines, "", "no problems found"]
