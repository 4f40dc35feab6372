.PHONY: quickstart test install

quickstart:
	bash deploy/quickstart.sh

test:
	bash deploy/test.sh

install:
	bash deploy/install.sh
