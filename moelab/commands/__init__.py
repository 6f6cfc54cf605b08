"""The commands of ``python -m moelab``, one module each, and what they share.

A command has ``add_arguments(parser)`` and ``run(args)``, which gives the exit status (None: 0).
Its help begins with its module's docstring.
``args.error(text)`` ends it as a wrong command line does. Commands that only measure are in lab.
The HTTP server behind ``serve`` is in server/.
"""
