"""Other people's clients, unmodified, against a server process of the demo model.

They are installed from PyPI into an environment of their own, which takes minutes, so it is `make
clients` that runs them, not `make test`; openai's own package is tested in test_demo_model.py.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.demo_model]

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".venv-clients"
PACKAGES = ["litellm>=1.110", "langchain-openai>=1.7", "llm>=0.36", "lm-eval[api]>=0.4.13"]
MODEL, KEY = "smollm2-135m", "key-of-a-user"
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


@pytest.fixture(scope="module")
def folder() -> Path:
    """The executables of the environment, which is made once and kept."""
    programs = ENVIRONMENT / "bin"
    if not (programs / "lm_eval").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        command = [str(programs / "pip"), "install", "--quiet", *PACKAGES]
        subprocess.run(command, check=True)
    return programs


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server process on a free port."""
    small = ["--max-num-seqs", "2", "--max-model-len", "512", "--max-num-batched-tokens", "64"]
    ports = ["--port", "0", "--grpc-port", "0"]
    command = [sys.executable, "-m", "swiftjax.cli", "serve", MODEL, *ports, *small]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"SWIFTJAX_API_KEYS": KEY}
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        found = next(m for line in lines if (m := re.search(r"on (http:\S+)", line)))
        reader = threading.Thread(target=process.stderr.read)  # a full pipe would hold it up
        reader.start()
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(30) == 0
        reader.join(10)
        process.stderr.close()


@pytest.fixture
def environment(address: str, tmp_path: Path) -> dict[str, str]:
    """What tells the clients where the server is, and nothing else."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
    }


def run(command: list[object], environment: dict[str, str], cwd: Path) -> str:
    """What a client prints."""
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", [LITELLM, LANGCHAIN], ids=["litellm", "langchain"])
def test_p18_libraries(
    script: str, folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    printed = run([folder / "python", "-c", script], environment, tmp_path)
    assert printed.splitlines() == [SUM, SUM, COUNTED]


def test_p18_llm(folder: Path, environment: dict[str, str], address: str, tmp_path: Path) -> None:
    model = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{address}/v1"}
    known = tmp_path / "extra-openai-models.yaml"
    known.write_text(json.dumps([model | {"api_key_name": "ours"}]))  # JSON is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"ours": KEY}))
    options = ["-o", "temperature", 0, "-o", "max_tokens", 16]
    command = [folder / "llm", "-m", MODEL, *options, QUESTION]
    printed = run(command, environment | {"LLM_USER_PATH": str(tmp_path)}, tmp_path)
    assert printed.strip() == SUM


def test_p18_lm_eval(
    folder: Path, environment: dict[str, str], address: str, tmp_path: Path
) -> None:
    """The likelihoods of two continuations, from echoed log-probabilities."""
    (tmp_path / "capitals.yaml").write_text(TASK)
    (tmp_path / "data.json").write_text(json.dumps({"text": "The capital of France is"}))
    settings = f"model={MODEL},base_url={address}/v1/completions,num_concurrent=1"
    settings += f",tokenizer_backend=remote,auth_token={KEY}"
    command = [folder / "lm_eval", "--model", "local-completions", "--model_args", settings]
    command += ["--tasks", "capitals", "--include_path", tmp_path, "--output_path", tmp_path]
    printed = run([*command, "--log_samples"], environment, tmp_path)
    assert re.search(r"\|acc +\|↑ +\| +1\|", printed), printed
    [samples] = tmp_path.rglob("samples_*.jsonl")
    likelihoods = [float(r[0]) for r in json.loads(samples.read_text())["filtered_resps"]]
    assert likelihoods == pytest.approx([-0.2581, -2.7408], abs=0.01)
