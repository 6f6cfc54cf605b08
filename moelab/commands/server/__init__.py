"""The HTTP server behind the command ``serve``, on Starlette, uvicorn and pydantic.

A request goes down and its answer comes up:

    http          limits, errors, hang-ups; one route for each dialect
    completions, agents     the dialects; a new one is a ``requests.Dialect`` in ``http.DIALECTS``
    requests      a checked request becomes one ``Ask`` for each text to write
    template      messages become tokens
    grammar       the form of an answer that a request asks for, as masks of logits
    engine        one thread reads prompts in parts and writes texts in batches
    prompts       caches of earlier prompts, kept over a restart if asked
    text          stop strings, reasoning and tool calls, in decoded text
"""
