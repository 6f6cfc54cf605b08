"""The commands of ``python -m moelab``, one module each, and what they share.

A module with a command has ``add_arguments(parser)`` and ``run(args)``, which returns the exit
status (None: 0). ``args.error(text)`` ends the command as a wrong command line does. The table in
``__main__`` names the module of each command; those that only measure are in ``moelab.lab``.

    argument_types   types of arguments, which refuse impossible values
    arguments        options that several commands have
    stream_options   options of ``StreamConfig``
    drafting         a draft by its name, and text written with it
    kv_cache         options of the key-value cache, and prompt cache files
    answers          the model behind ``serve``, its batches and kept prompts
    request_checks   what ``serve`` refuses in a request
"""
