"""The checked-in generated code is what the .proto gives, and the messages keep their promises."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swiftjax.serving.proto import swiftjax_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROTO = "swiftjax/serving/proto/swiftjax.proto"
GENERATED = ("swiftjax_pb2.py", "swiftjax_pb2.pyi", "swiftjax_pb2_grpc.py")
# The version that `make proto` uses. It needs an older protobuf than the one installed beside us,
# so it lives in an environment of its own, which is made once (from PyPI) and kept.
TOOLS = "grpcio-tools==1.75.1"
ENVIRONMENT = ROOT / ".venv-proto"


@pytest.fixture(scope="module")
def tools_python() -> Path:
    python = ENVIRONMENT / "bin" / "python"
    commands = [[sys.executable, "-m", "venv", str(ENVIRONMENT)]] if not python.exists() else []
    commands.append([str(python), "-m", "pip", "install", "--quiet", TOOLS])
    check = [str(python), "-c", "import grpc_tools"]
    if commands[:-1] or subprocess.run(check, capture_output=True, check=False).returncode:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{TOOLS} cannot be installed:\n{done.stderr[-2000:]}"
    return python


def test_regenerating_changes_nothing(tools_python: Path, tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [str(tools_python), "-m", "grpc_tools.protoc", "-I.", *outputs, PROTO], cwd=ROOT, check=True
    )
    for name in GENERATED:
        fresh = (tmp_path / PROTO).with_name(name).read_text()
        assert (ROOT / PROTO).with_name(name).read_text() == fresh, f"{name}: run make proto"


def test_every_option_says_whether_it_was_set() -> None:
    for message in (pb.SamplingOptions, pb.StopOptions):
        for field in message.DESCRIPTOR.fields:
            assert field.is_repeated or field.has_presence, field.full_name


_PREFIXES = {"FinishReason": "FINISH_REASON_", "LogprobsMode": "LOGPROBS_MODE_"}


def test_names_follow_the_style_guide() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    for method in (method for service in services for method in service.methods):
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
        assert all(value.name.startswith(_PREFIXES[enum.name]) for value in enum.values)
    assert pb.DESCRIPTOR.package == "swiftjax.v1"


def test_seed_has_64_bits_and_there_are_no_maps() -> None:
    seed = pb.SamplingOptions.DESCRIPTOR.fields_by_name["seed"]
    assert seed.type == FieldDescriptor.TYPE_UINT64
    messages: list[Descriptor] = list(pb.DESCRIPTOR.message_types_by_name.values())
    assert not any(message.nested_types for message in messages)
