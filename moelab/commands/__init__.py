"""The commands of ``python -m moelab``, one module each, and what they share.

A module with a command has ``add_arguments(parser)`` and ``run(args)``, which returns the exit
status (None: 0). ``args.error(text)`` ends the command as a wrong command line does. The table in
``__main__`` names the module of each command; those that only measure are in ``moelab.lab``.
"""
