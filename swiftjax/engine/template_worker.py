"""The process in which a chat template runs: lines of JSON in, lines of JSON out.

`chat_template.py` starts this file as a program; it imports nothing of ours. minijinja gives a
template no way to Python objects; the limits set here bound what is left: steps, CPU time, memory,
and no file can be opened. A limit may kill the process, and the caller starts another.
"""

import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import minijinja

FUEL = 2_000_000  # about 25 ns each: 50 ms. A conversation of 1,000 messages takes some 50,000
CPU_SECONDS = 0.5  # per render: the fuel does not count the work of one filter, nor reading JSON
MEMORY_BYTES = 512 * 2**20  # address space, of which the interpreter takes about 50 MiB
MAX_OUTPUT_CHARS = 16 * 2**20
TEMPLATE = "chat template"

# transformers marks assistant turns with this tag; it renders as its contents.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_UNSUPPORTED = {"SyntaxError", "UnknownFilter", "UnknownTest", "UnknownFunction", "UnknownMethod"}


class RefusedError(Exception):
    """The template called raise_exception."""


def raise_exception(message: str = "") -> str:
    """Refuse the conversation, as templates of transformers do."""
    raise RefusedError(str(message))


def strftime_now(format: str) -> str:
    """Format the local time now."""
    return datetime.datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: plain characters, no escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def make_environment(source: str) -> minijinja.Environment:
    """Make an environment that behaves as the one of transformers and holds one template."""
    source = _GENERATION_TAG.sub(
        lambda tag: "{%" + tag[1] + (" endif " if tag[2] else " if true ") + tag[3] + "%}", source
    )
    environment = minijinja.Environment(
        fuel=FUEL,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: None,
        filters={"tojson": tojson},
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
    )
    environment.add_template(TEMPLATE, source)
    return environment


def render(
    environment: minijinja.Environment, variables: Mapping[str, Any], question: Mapping[str, Any]
) -> dict[str, str]:
    """Render one conversation; failures are answers as well."""
    try:
        text = environment.render_template(
            TEMPLATE, **{**variables, "tools": None, "documents": None, **question}
        )
    except Exception as error:
        return describe(error)
    if len(text) > MAX_OUTPUT_CHARS:
        return {"error": "budget", "detail": f"{MAX_OUTPUT_CHARS} characters of prompt"}
    return {"text": text}


def describe(error: Exception) -> dict[str, str]:
    """Turn an exception of a template into an answer for the caller."""
    if isinstance(error, RefusedError):
        return {"error": "refused", "detail": str(error)[:300]}
    if isinstance(error, MemoryError):
        return {"error": "budget", "detail": f"{MEMORY_BYTES // 2**20} MiB of memory"}
    kind = getattr(error, "kind", "")
    if kind == "OutOfFuel":
        return {"error": "budget", "detail": f"{FUEL} steps"}
    detail = str(getattr(error, "message", error))[:300]
    return {"error": "unsupported" if kind in _UNSUPPORTED else "failed", "detail": detail}


def _warm_up() -> None:
    """Make Python and minijinja read now what they read from files on first use."""
    strftime_now("%A %B %p %Z")
    for source in ("{{ x.y }}", "{{ '<'|e|tojson|safe }}", "{{ raise_exception('x') }}"):
        render(make_environment(source), {}, {"messages": []})


def _limit() -> None:
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3,
    }
    for name, value in limits.items():
        try:
            resource.setrlimit(name, (value, value))
        except (OSError, ValueError):  # macOS has no limit on address space; the others hold
            continue
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def main() -> None:
    """Answer the set-up line, then one line per conversation, until the input ends."""
    environment: minijinja.Environment | None = None
    variables: Mapping[str, Any] = {}
    _warm_up()
    _limit()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        question = json.loads(line)
        if environment is None:
            try:
                environment = make_environment(question["source"])
                variables, answer = question["variables"], {"text": ""}
            except Exception as error:
                answer = describe(error)
        else:
            answer = render(environment, variables, question)
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
