"""Chat templates: the same text as transformers gives, and nothing a bad template can do."""

import datetime
import gc
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swiftjax.engine.chat_messages import check_messages
from swiftjax.engine.chat_template import ChatTemplate
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError, UnsupportedError
from tests.tiny_tokenizers import byte_level_files

FOLDER = Path(__file__).parent / "chat_templates"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "Hi"}]


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def _render(source: str, messages: Any = HI) -> str:
    return ChatTemplate(source, VARIABLES).render(messages, max_chars=10_000)


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.jinja"))])
def test_renders_as_transformers_does(name: str) -> None:
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), VARIABLES)
    for key, expected in _read("goldens.json").items():
        style, conversation, prompt = key.split("/")
        if style != name:
            continue
        try:
            text = template.render(
                _read("conversations.json")[conversation],
                add_generation_prompt=prompt == "True",
                max_chars=10_000,
            )
        except InvalidRequestError as error:
            text = str(error).replace("the chat template refused the messages", "refused")
        assert text == expected, key


@pytest.mark.demo_model
def test_smollm2_template(smollm2: Tokenizer) -> None:
    """The template inside the GGUF, by hand: its own system turn unless the first one is given."""
    turns = [{"role": "system", "content": "S"}, *HI, {"role": "assistant", "content": "A"}]
    assert smollm2.apply_chat_template(turns, add_generation_prompt=False, tokenize=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n"
    )
    assert smollm2.apply_chat_template(HI, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def call(**fields: Any) -> dict[str, Any]:
    """An assistant's turn of one tool call."""
    function = {"name": "get", "arguments": "{}"} | fields
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def test_tools_and_calls_reach_the_template() -> None:
    """Arguments as an object, whose order is kept; a tool's answer with the id of its call."""
    turns = [
        *HI,
        call(arguments='{"b": [1, "é"], "a": null}'),
        {"role": "tool", "content": "{}", "tool_call_id": "call_1"},
    ]
    turns[1]["tool_calls"][0]["id"] = "call_1"
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"z": 1, "a": 2}}}]
    template = ChatTemplate("{{ tools | tojson }}\n{{ messages[1:] | tojson }}", {})
    first, second = template.render(turns, tools=tools, max_chars=1000).splitlines()
    assert first == json.dumps(tools)
    called = {
        "type": "function",
        "function": {"name": "get", "arguments": {"b": [1, "é"], "a": None}},
    }
    assert json.loads(second) == [
        {"content": "", "role": "assistant", "tool_calls": [called | {"id": "call_1"}]},
        {"role": "tool", "content": "{}", "tool_call_id": "call_1"},
    ]
    assert '"arguments": {"b"' in second
    assert template.knows_tools and not ChatTemplate("{{ toolset }}", {}).knows_tools
    with pytest.raises(InvalidRequestError, match=r"tools has .* characters; at most 20"):
        template.render(HI, tools=tools, max_chars=20)
    assert template.render(HI, max_chars=1000).startswith("null\n")


def test_strftime_now() -> None:
    assert _render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert _render("{{ strftime_now is defined }}") == "True"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert check_messages([{"role": "user", "content": parts, "name": None}], 100) == [
        {"role": "user", "content": "one\ntwo"}
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ([3], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([*HI, {"role": "assistant", "content": None}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be text, not int"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role must be text"),
        ([{"role": "r" * 65, "content": "x"}], r"role has 65 characters; at most 64"),
        ([{"role": "user", "content": "x" * 101}], "content has 101 characters; at most 100"),
        ([{"role": "user", "content": "x" * 60}] * 2, r"\[1\].content has 60 .* at most 40"),
        ([{"role": "user", "content": "a\0"}], "NUL character"),
        ([{"role": "\ud800", "content": "a"}], "lone surrogate"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url'; only"),
        ([{"role": "user", "content": ["x"]}], "only {type: 'text', text}"),
        ([{"role": "user", "content": "", "tools": [1]}], "'tools'.*known are role"),
        ([{"role": "assistant", "tool_calls": [1]}], r"\[0\].tool_calls\[0\] must be {id"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([call(arguments="[1]")], r"function.arguments must be the text of a JSON object"),
        ([call(arguments='{"a": 1')], "must be the text of a JSON object"),
        ([call(arguments="[" * 99)], "must be the text of a JSON object"),
        ([call(arguments='{"a": "\\ud800"}')], "lone surrogate"),
        ([call(arguments='{"a": "%s"}' % ("x" * 100))], "arguments has 109 characters"),
        ([call(name="n" * 65)], "name has 65 characters"),
        ([call(name=None)], "name must be text"),
    ],
)
def test_messages_that_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_messages(messages, 100)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match=r"no chat template.*--chat-template"):
        Tokenizer(byte_level_files()).apply_chat_template(HI)


def test_the_operators_template_replaces_the_models() -> None:
    files = byte_level_files(chat_template="model")
    assert Tokenizer(files, chat_template="mine").apply_chat_template(HI, tokenize=False) == "mine"


def test_a_broken_template_stops_chats_only() -> None:
    """The model's own is found out on first use; the operator's at the start."""
    tokenizer = Tokenizer(byte_level_files(chat_template="{% if %}"))
    assert tokenizer.encode("hello")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="syntax error"):
            tokenizer.apply_chat_template(HI)
    with pytest.raises(UnsupportedError, match="syntax error"):
        Tokenizer(byte_level_files(), chat_template="{% if %}")


ESCAPES = [
    "{{ cycler.__init__.__globals__.os.popen('touch FILE').read() }}",
    "{{ raise_exception.__globals__['__builtins__'].open('FILE', 'w') }}",
    "{{ strftime_now.__globals__.datetime.sys.modules.os.system('touch FILE') }}",
    "{{ (raise_exception|attr('__globals__'))['__builtins__']['open']('FILE', 'w') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages[0].__class__.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__.open('FILE', 'w') }}",
    "{{ messages[0].items.__self__.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ __import__('os').system('touch FILE') }}{{ open('FILE', 'w') }}",
    "{{ lipsum.__globals__['os'].system('touch FILE') }}",
    "{% import 'os' as os %}{{ os.system('touch FILE') }}",
    "{% include '/etc/hostname' %}",
    "{% extends '/etc/hostname' %}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages|map(attribute='__class__')|list|string ~ messages.copy.__self__.__class__() }}",
    "{{ raise_exception.__call__.__self__.__code__.co_consts[0] }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_p12_b070_escape(source: str, tmp_path: Path) -> None:
    """No way to Python: the scratch file never appears, and no internals show."""
    scratch = tmp_path / "scratch"
    try:
        text = _render(source.replace("FILE", str(scratch)))
    except (InvalidRequestError, UnsupportedError):
        text = ""
    assert not scratch.exists()
    assert "class" not in text and "<module" not in text


BOMBS = {
    "nested loops": "{% for i in range(10**5) %}{% for j in range(10**5) %}"
    "{% for k in range(10**5) %}x{% endfor %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "repeat": "{{ 'x' * 10**12 }}",
    "list": "{{ ([0] * 99999)|list * 99999 }}",
    "replace": "{{ ('x' * 99999)|replace('x', 'y' * 99999) }}",
    "format width": "{{ '{:>99999999999}'.format('x') }}",
    "indent": "{{ 'x'|indent(10**12, true) }}",
    "recursion": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaaaaaa') }}",
    "json": "{{ range(99999)|batch(1)|list|tojson(indent=99999) }}",
    "sorting": "{% for i in range(99999) %}{{ range(99999)|sort|length }}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "power": "{{ 10 ** 10 ** 10 ** 10 }}",
    "parser": "{{ " + "(" * 100_000 + " }}",
    "blocks": "{% if true %}" * 50_000,
    "source": "x" * (2**20 + 1),
    "surrogate": "\ud800",
}


def processor_seconds() -> float:
    """Time that this process and those that it ended have computed."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.mark.parametrize("name", BOMBS)
def test_p12_b070_bomb(name: str) -> None:
    """Every bomb ends in an error after 2 s of computing at most, and not the process."""
    start = processor_seconds()
    with pytest.raises((InvalidRequestError, UnsupportedError), match="chat template"):
        _render(BOMBS[name])
    assert processor_seconds() - start < 2.0


def test_b070_a_render_after_a_bomb_works() -> None:
    """A worker that was killed is replaced."""
    template = ChatTemplate(
        "{% if messages[0].content == 'boom' %}" + BOMBS["json"] + BOMBS["format width"]
        + "{% endif %}ok",
        {},
    )  # fmt: skip
    assert template.render(HI, max_chars=100) == "ok"
    with pytest.raises(InvalidRequestError, match="budget"):
        template.render([{"role": "user", "content": "boom"}], max_chars=100)
    assert template.render(HI, max_chars=100) == "ok"


def test_b070_messages_are_data() -> None:
    """What a request sends is never run as a template."""
    content = "{{ 7 * 7 }}{% for i in range(10) %}x{% endfor %}"
    assert _render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_threads_take_turns() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    texts = [f"message {i} " * 2000 for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        rendered = pool.map(
            lambda text: template.render([{"role": "user", "content": text}], max_chars=10**6),
            texts,
        )
        assert list(rendered) == texts


def test_the_process_ends_with_the_template() -> None:
    template = ChatTemplate("x", {})
    template.check()
    worker = template._worker
    assert worker is not None and worker.poll() is None
    del template
    gc.collect()
    assert worker.poll() is not None
