"""Run real clients against the server of ``serve``, with a model whose answers are scripted.

    python data/recipes/clients.py [codex] [ai-sdk]

Codex and the AI SDK have HTTP clients of their own. LangChain, pydantic-ai and aider use OpenAI's
and Anthropic's Python packages, and tests/server tests these packages.

npm fetches each client into a folder of its own under build/clients. The scripted model thinks,
calls two tools at once, is silent for 30 seconds and writes 2,000 words. Codex has to read a file,
change the file and run a command. The AI SDK has to run the called tool, and to read objects
that tiny-moe writes by a JSON schema. The script prints a table (client, version, what the client
did) and exits with 1 if a client failed.
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


class Scripted(Speaker):
    """An engine that writes given turns in a cycle; it is silent once, before the last turn."""

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
    """Run a command and return its lines."""
    given |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 900}
    return subprocess.run(command, check=True, **given).stdout.strip().splitlines()


def of_npm(*packages):
    """Install packages; return their folder and the first package's version."""
    folder = BUILD / packages[0].replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    ran("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages)
    package = folder / "node_modules" / packages[0] / "package.json"
    return folder, json.loads(package.read_text())["version"]


def codex():
    folder, version = of_npm("@openai/codex")
    file = Path(tempfile.mkdtemp(dir=folder)) / "a.txt"
    file.write_text("hello\n")

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
    real = serving(*SLOTS, "--chat-template", TEMPLATE, "--log-level", "ERROR")
    with speaking(engine=Scripted(TURNS)) as scripted, real as server:
        return version, ran("node", folder / "try.mjs", scripted, server.url)


CLIENTS = {"codex": codex, "ai-sdk": ai_sdk}


def main():
    failed = 0
    for name in sys.argv[1:] or CLIENTS:
        try:
            version, said = CLIENTS[name]()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            told = [getattr(error, name, None) or "" for name in ("stdout", "stderr")]
            version, said, failed = "failed", [str(error), *(str(text)[-2000:] for text in told)], 1
        for line in said:
            print(f"{name:12s} {version:10s} {line}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
