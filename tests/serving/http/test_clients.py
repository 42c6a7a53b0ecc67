"""Other people's clients, unmodified, against a server of the demo model.

They live in an environment of their own. All of them run at once, because most of their time goes
into being imported; each test looks at what one has printed. openai's own package is tested in
test_demo_model.py.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.environments import programs_of
from tests.serving.http.harness import DEMO_MODEL as MODEL
from tests.serving.http.harness import KEY

pytestmark = pytest.mark.demo_model

PACKAGES = ("litellm>=1.110", "langchain-openai>=1.7", "llm>=0.36", "lm-eval[api]>=0.4.13")
QUESTION, SUM = "What is 2+2?", "The answer to this classic math problem is 4."
COUNT, COUNTED = "1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10,"

LITELLM = f"""
import litellm
options = dict(temperature=0, max_tokens=16)
chat = dict(model="openai/{MODEL}", messages=[dict(role="user", content="{QUESTION}")], **options)
answer = litellm.completion(**chat)
print(answer.choices[0].message.content)
parts = litellm.completion(stream=True, **chat)
print("".join(part.choices[0].delta.content or "" for part in parts))
model = "text-completion-openai/{MODEL}"
print(litellm.text_completion(model=model, prompt="{COUNT}", **options).choices[0].text)
"""
LANGCHAIN = f"""
from langchain_openai import ChatOpenAI, OpenAI
options = dict(model="{MODEL}", temperature=0, max_tokens=16)
chat = ChatOpenAI(**options)
print(chat.invoke("{QUESTION}").content)
print("".join(part.content for part in chat.stream("{QUESTION}")))
print(OpenAI(**options).invoke("{COUNT}"))
"""
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: data.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["Paris", "the"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


Running = dict[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the clients take for their user's."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def running(address: str, home: Path) -> Iterator[Running]:
    """Every client, started."""
    programs = programs_of("clients", *PACKAGES)
    commands = {
        "litellm": [programs / "python", "-c", LITELLM],
        "langchain": [programs / "python", "-c", LANGCHAIN],
        "llm": prepare_llm(programs, home, address),
        "lm_eval": prepare_lm_eval(programs, home, address),
    }
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LLM_USER_PATH": str(home),
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_DATASETS_CACHE": str(home / "datasets"),
    }
    # One that writes more than a pipe holds waits until its test reads.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = {
        name: subprocess.Popen(
            list(map(str, command)), env=environment, cwd=home, text=True, **pipes
        )
        for name, command in commands.items()
    }
    yield processes
    for process in processes.values():
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.fixture
def printed(running: Running) -> Callable[[str], str]:
    """Waits for a client and gives what it printed."""

    def wait(name: str) -> str:
        text, errors = running[name].communicate(timeout=300)
        assert running[name].returncode == 0, errors[-3000:]
        return text

    return wait


def prepare_llm(programs: Path, home: Path, address: str) -> list[object]:
    """Tell the llm command of the model; how to ask it."""
    model = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{address}/v1"}
    known = home / "extra-openai-models.yaml"
    known.write_text(json.dumps([model | {"api_key_name": "ours"}]))  # JSON is YAML
    (home / "keys.json").write_text(json.dumps({"ours": KEY}))
    options = ["-o", "temperature", 0, "-o", "max_tokens", 16]
    return [programs / "llm", "-m", MODEL, *options, QUESTION]


def prepare_lm_eval(programs: Path, home: Path, address: str) -> list[object]:
    """Write a task of one question; how to evaluate it."""
    (home / "capitals.yaml").write_text(TASK)
    (home / "data.json").write_text(json.dumps({"text": "The capital of France is"}))
    settings = f"model={MODEL},base_url={address}/v1/completions,num_concurrent=1"
    settings += f",tokenizer_backend=remote,auth_token={KEY}"
    command = [programs / "lm_eval", "--model", "local-completions", "--model_args", settings]
    command += ["--tasks", "capitals", "--include_path", home, "--output_path", home]
    return [*command, "--log_samples"]


@pytest.mark.parametrize("name", ["litellm", "langchain"])
def test_p18_libraries(name: str, printed: Callable[[str], str]) -> None:
    assert printed(name).splitlines() == [SUM, SUM, COUNTED]


def test_p18_llm(printed: Callable[[str], str]) -> None:
    assert printed("llm").strip() == SUM


def test_p18_lm_eval(printed: Callable[[str], str], home: Path) -> None:
    """The likelihoods of two continuations, from echoed log-probabilities."""
    table = printed("lm_eval")
    assert re.search(r"\|acc +\|↑ +\| +1\|", table), table
    [samples] = home.rglob("samples_*.jsonl")
    likelihoods = [float(r[0]) for r in json.loads(samples.read_text())["filtered_resps"]]
    assert likelihoods == pytest.approx([-0.2581, -2.7408], abs=0.01)
