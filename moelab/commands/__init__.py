"""The commands of ``python -m moelab``, one module each, and what they share.

A command has ``add_arguments(parser)`` and ``run(args)``, which returns the exit status (None: 0).
``args.error(text)`` ends the command as a wrong command line does. The command's help begins with
its module's docstring. Commands that only measure are in lab/.
"""
