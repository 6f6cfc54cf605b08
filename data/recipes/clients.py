"""Run real clients against the server of ``serve``, with a model whose answers are scripted.

    python data/recipes/clients.py [codex] [ai-sdk] [langchain] [pydantic-ai] [aider]

Each client is fetched by npm or pip into an environment of its own under build/clients. The model
thinks, calls two tools at once, is silent for 30 seconds and writes 2,000 words. Codex has to read
a file, change it and run a command. aider has to change a file. The others have to run the called
tool, and to read objects of a schema, which the model tiny-moe writes. Prints a table (client,
version, what the client did) and exits with 1 if a client failed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from in_process import SLOTS, serving  # noqa: E402
from speaker import CALL, TEMPLATE, USAGE, Speaker, speaking  # noqa: E402

from moelab.commands.server.ask import Part  # noqa: E402

BUILD, LONG = ROOT / "build" / "clients", "done " * 2000
TURNS = [["<think>Hm</think>A", CALL, CALL], [LONG]]  # for clients that have a tool f
AI_SDK = """
import { generateObject, generateText, streamText, tool, stepCountIs } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { z } from 'zod';
globalThis.AI_SDK_LOG_WARNINGS = false;
const clients = (baseURL) => {
  const options = { baseURL, apiKey: 'x' }, openai = createOpenAI(options), m = 'default_model';
  return { responses: openai(m), chat: openai.chat(m), messages: createAnthropic(options)(m) };
};
const inputSchema = z.object({ a: z.any() }), stopWhen = stepCountIs(4);
const prompt = 'x', schema = z.object({ kind: z.enum(['file', 'folder']), open: z.boolean() });
const tools = { f: tool({ description: 'Do', inputSchema, execute: async () => 'ok' }) };
for (const [name, model] of Object.entries(clients(process.argv[3]))) {
  console.log(name, JSON.stringify((await generateObject({ model, schema, prompt })).object));
}
for (const [name, model] of Object.entries(clients(process.argv[2]))) {
  const whole = await generateText({ model, tools, prompt, stopWhen });
  const stream = streamText({ model, tools, prompt, stopWhen });
  let text = ''; for await (const piece of stream.textStream) text += piece;
  const steps = [whole.steps.length, (await stream.steps).length];
  console.log(name, 'steps', ...steps, 'characters', whole.text.length, text.length);
  if (whole.text !== LONG || !text.endsWith(LONG) || steps.some((n) => n !== 2)) process.exit(1);
}
"""
ENTRY = """
import sys
from typing import Literal
from pydantic import BaseModel
class Entry(BaseModel):
    kind: Literal["file", "folder"]
    open: bool
"""
LANGCHAIN = """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
def f(a: list) -> str:
    "Do."
    return "ok"
for responses in (False, True):
    model = ChatOpenAI(
        model="default_model", base_url=sys.argv[1], api_key="x", use_responses_api=responses
    ).bind_tools([f])
    said = [HumanMessage("x"), model.invoke("x")]
    said += [ToolMessage(f(**call["args"]), tool_call_id=call["id"]) for call in said[1].tool_calls]
    text = "".join(piece.text for piece in model.stream(said))
    print("responses" if responses else "chat", len(said) - 2, "calls,", len(text), "characters")
    assert len(said) == 4 and text == LONG
    model = ChatOpenAI(
        model="default_model", base_url=sys.argv[2], api_key="x", use_responses_api=responses
    )
    for method in ("json_schema", "function_calling"):
        print(method, made := model.with_structured_output(Entry, method=method).invoke("x"))
        assert isinstance(made, Entry)
"""
PYDANTIC_AI = """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
calls, provider = [], OpenAIProvider(base_url=sys.argv[1], api_key="x")
agent = Agent(OpenAIChatModel("default_model", provider=provider))
@agent.tool_plain
def f(a: list) -> str:
    calls.append(a)
    return "ok"
text = agent.run_sync("x").output
print("chat", len(calls), "calls,", len(text), "characters")
assert len(calls) == 2 and text.strip() == LONG.strip()
provider = OpenAIProvider(base_url=sys.argv[2], api_key="x")
for kind in (Entry, NativeOutput(Entry)):
    model = OpenAIChatModel("default_model", provider=provider)
    agent = Agent(model, output_type=kind, model_settings={"parallel_tool_calls": False})
    print(type(kind).__name__, made := agent.run_sync("x").output)
    assert isinstance(made, Entry)
"""


class Scripted(Speaker):
    """An engine that says one turn after the other; it is silent once, before the last turn."""

    def __init__(self, turns):
        super().__init__()
        self._turns, self._next = turns, 0

    def _write(self, tell):
        self._next += 1
        if self._next == len(self._turns):
            time.sleep(30)
        for said in self._turns[(self._next - 1) % len(self._turns)]:
            tell(Part(said))
        tell(Part(finish="stop", usage=USAGE))


def ran(*command, **given):
    """Run a command and return its lines; raise OSError with its output if it fails."""
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True} | given
    done = subprocess.run([*map(str, command)], timeout=900, **given)
    if done.returncode:
        raise OSError(
            f"{command[0]}: {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    return done.stdout.strip().splitlines()


def of_npm(*packages):
    """Install packages; return their folder and the first package's version."""
    folder = BUILD / packages[0].replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    ran("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages)
    package = folder / "node_modules" / packages[0] / "package.json"
    return folder, json.loads(package.read_text())["version"]


def of_pip(*packages):
    """Install packages; return the folder of their commands and the first package's version."""
    folder, name = BUILD / packages[0], packages[0].split("[")[0]
    ran(sys.executable, "-m", "venv", folder)
    ran(folder / "bin" / "pip", "install", "-q", *packages)
    asked = f"import importlib.metadata as m; print(m.version({name!r}))"
    return folder / "bin", ran(folder / "bin" / "python", "-c", asked)[0]


def a_file(folder):
    file = Path(tempfile.mkdtemp(dir=folder)) / "a.txt"
    file.write_text("hello\n")
    return file


def codex():
    folder, version = of_npm("@openai/codex")
    file = a_file(folder)

    def call(command):
        said = {"name": "exec_command", "arguments": {"cmd": command}}
        return f"<tool_call>{json.dumps(said)}</tool_call>"

    both = [call("sed -i s/hello/bye/ a.txt"), call("ls")]
    turns = [["I read it. ", call("cat a.txt")], ["<think>Hm</think>", *both], [LONG]]
    with speaking(engine=Scripted(turns)) as url:
        here = f'{{name="here", base_url="{url}", stream_idle_timeout_ms=10000}}'
        options = ["-m", "default_model", "-c", "model_provider=here"]
        options += ["-c", f"model_providers.here={here}"]
        options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        command = folder / "node_modules" / ".bin" / "codex"
        home = os.environ | {"CODEX_HOME": str(file.parent)}
        said = "\n".join(ran(command, "exec", *options, "change a.txt", cwd=file.parent, env=home))
    assert file.read_text() == "bye\n" and LONG.strip() in said, said[-500:]
    return version, ["responses: read, changed, two calls at once, 2,000 words"]


def ai_sdk():
    folder, version = of_npm("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")
    (folder / "try.mjs").write_text(AI_SDK.replace("LONG", json.dumps(LONG)))
    return version, asked("node", folder / "try.mjs")


def asked(*command):
    """Run a program with two servers, of the scripted model and tiny-moe; return its lines."""
    real = serving(*SLOTS, "--chat-template", TEMPLATE, "--log-level", "ERROR")
    with speaking(engine=Scripted(TURNS)) as url, real as server:
        return ran(*command, url, server.url)


def of_python(code, *packages):
    def client():
        folder, version = of_pip(*packages)
        return version, asked(folder / "python", "-c", ENTRY + code.replace("LONG", repr(LONG)))

    return client


def aider():
    folder, version = of_pip("aider-chat")
    file = a_file(folder)
    options = ["--no-git", "--yes", "--edit-format", "whole", "--no-show-model-warnings"]
    options += ["--no-check-update", "--analytics-disable", "--model", "openai/default_model"]
    for kept in ("chat", "input"):  # else aider writes them beside the nearest .git
        options += [f"--{kept}-history-file", file.parent / f"{kept}.txt"]
    with speaking(engine=Scripted([["a.txt\n```\nbye\n```\n"]])) as url:
        options += ["--openai-api-base", url, "--openai-api-key", "x"]
        ran(folder / "aider", *options, "--message", "change a.txt", file, cwd=file.parent)
    assert file.read_text() == "bye\n", file.read_text()
    return version, ["chat: changed a file"]


CLIENTS = {
    "codex": codex,
    "ai-sdk": ai_sdk,
    "langchain": of_python(LANGCHAIN, "langchain-openai"),
    "pydantic-ai": of_python(PYDANTIC_AI, "pydantic-ai-slim[openai]"),
    "aider": aider,
}


def main():
    failed = 0
    for name in sys.argv[1:] or CLIENTS:
        try:
            version, said = CLIENTS[name]()
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            version, said, failed = "failed", [str(error)[-1500:]], 1
        for line in said:
            print(f"{name:12s} {version:10s} {line}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
