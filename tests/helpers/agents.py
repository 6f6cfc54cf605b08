"""One conversation as Codex and as Claude Code send it, and the chat that both mean."""

HI, TOOL = {"text": "Hi"}, {"name": "f", "description": "Do"}
DOES = TOOL | {"parameters": {"type": "object"}}
SAME = {"model": "default_model", "temperature": 0.5, "top_p": 0.9, "stream": True}

CALLED = {"c1": ("f", {"a": 1}), "c2": ("m__f", {"a": 1}), "c3": ("patch", {"input": "x"})}
CALLED = {i: {"name": name, "arguments": given} for i, (name, given) in CALLED.items()}
CALLS = [{"id": i, "type": "function", "function": called} for i, called in CALLED.items()]
CHAT = SAME | {
    "messages": [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning": "Hm", "content": "Ok", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "Hi(an image was left out)"},
        {"role": "user", "content": "Hi\n\nC"},
    ],
    "tools": [{"type": "function", "function": DOES | {"name": name}} for name in ("f", "m__f")],
    "max_tokens": 5,
    "reasoning_effort": "high",
}

SAID = {"type": "message", "role": "user", "content": [{"type": "input_text"} | HI]}
DEVELOPER = {"type": "message", "role": "developer", "content": "C"}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": None, "id": "rs_1"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
CODEX = SAME | {
    "instructions": "A",
    "input": [
        DEVELOPER | {"content": [{"type": "input_text", "text": "B"}]},
        SAID,
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Ok"}]},
        CALL,
        THOUGHT | {"content": None},
        CALL | {"call_id": "c2", "status": "completed", "namespace": "m"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "custom_tool_call", "id": "x", "call_id": "c3", "name": "patch", "input": "x"},
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [*SAID["content"], IMAGE]},
        SAID,
        DEVELOPER,
    ],
    "max_output_tokens": 5,
    "tool_choice": "auto",
    "tools": [
        *(GIVEN := [DOES | {"type": "function"}]),
        {"type": "namespace", "name": "m", "description": "Do", "tools": GIVEN},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "parameters": {}},
    ],
    "parallel_tool_calls": False,
    "reasoning": {"effort": "high", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "text": {"verbosity": "low", "format": {"type": "text"}},
    "truncation": "auto",
    "client_metadata": {"x": "y"},
    "store": False,
    "prompt_cache_key": "0199",
    "service_tier": None,
    "previous_response_id": None,
}

CACHED = {"cache_control": {"type": "ephemeral"}}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc;"}
TEXT = {"type": "text"} | HI | CACHED
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "1", "is_error": True}
OWN = TOOL | {"input_schema": {"type": "object"}, "strict": True} | CACHED
PICTURE = {"type": "image", "source": {"type": "base64", "data": "AA"}}
SHOWN = RESULT | {"tool_use_id": "c2", "content": [TEXT, PICTURE]}
CLAUDE_CODE = SAME | {
    "system": [BILLING, TEXT | {"text": "A"}, TEXT | {"text": "B"}],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "abc"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "Ok"},
                USE,
                USE | {"id": "c2", "name": "m__f"},
                USE | {"id": "c3", "name": "patch", "input": {"input": "x"}},
            ],
        },
        {"role": "user", "content": [RESULT, SHOWN, TEXT]},
        {"role": "system", "content": "C"},
    ],
    "max_tokens": 5,
    "stop_sequences": ["z"],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "tools": [
        OWN,
        OWN | {"name": "m__f"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "x"},
    "service_tier": "auto",
    "top_k": None,
}
