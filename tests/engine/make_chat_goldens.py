"""Render the chat templates with transformers (jinja2) into chat_templates/goldens.json.

Run from the repository root where the extra `parity` is installed:
`python tests/engine/make_chat_goldens.py`. The tests compare our rendering with this file.
"""

import json
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(__file__).parent / "chat_templates"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def _render(source: str, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    try:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            **VARIABLES,
        )
    except TemplateError as error:
        return f"refused: {error}"
    return rendered[0]


def main() -> None:
    """Write every template x conversation x generation prompt."""
    conversations = json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8"))
    goldens = {
        f"{path.stem}/{name}/{prompt}": _render(path.read_text(encoding="utf-8"), messages, prompt)
        for path in sorted(FOLDER.glob("*.jinja"))
        for name, messages in conversations.items()
        for prompt in (False, True)
    }
    text = json.dumps(goldens, indent=1, ensure_ascii=False)
    (FOLDER / "goldens.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
