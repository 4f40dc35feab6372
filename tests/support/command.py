"""The command line as a process."""

from asyncrl.hosting.processes import module_argv

ASYNCRL = module_argv("asyncrl.cli.main")
