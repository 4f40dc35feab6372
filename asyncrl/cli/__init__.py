"""The command line: arguments, screens, signals and exit statuses. Only this package prints."""
