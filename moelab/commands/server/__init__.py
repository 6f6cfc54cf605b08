"""The HTTP server behind the command ``serve``, on Starlette, uvicorn and pydantic.

A request passes these modules from top to bottom, and its answer from bottom to top:

    http          errors, clients that hang up, Ctrl-C; one route for each dialect
    completions, agents     the dialects; a new one is a ``requests.Dialect`` in ``http.DIALECTS``
    requests      a request is checked and becomes one ``Ask`` for each text to write
    template      messages become tokens
    grammar       masks of logits keep an answer to the form that a request asks for
    engine        one thread reads prompts in parts and writes texts in batches
    prompts       caches of earlier prompts; an option keeps them for the next start
    text          stop strings, reasoning and tool calls, in decoded text
"""
