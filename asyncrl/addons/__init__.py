"""What not every run needs. The core opens it by name, when a config asks for it."""
