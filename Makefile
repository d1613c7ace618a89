# Everything is made on first use; scripts/ has the how.
#
#   make test                the suite in both lanes; a machine without the te lane's needs says so in the last lines
#   REQUIRE_TE=1 make test   the same, and there that is an error
#   make demo                examples/gpt_fp8_resume.py; LANE=te runs it on Transformer Engine's own classes
#   SCHEME=mxfp8 make demo   the same in another scheme: float8 (the default), blockwise, mxfp8 or nvfp4
#   ARGS="-k name -x"        goes to pytest, with any of the test targets

.PHONY: demo env-light env-te lint test test-full test-light test-te
.NOTPARALLEL: # the targets make the same environments

ARGS =

env-light:
	@scripts/env.sh light dev

env-te:
	@scripts/env.sh te dev

lint:
	@scripts/lint.sh

test:
	@scripts/test.sh light te -- $(ARGS)

test-light:
	@scripts/test.sh light -- $(ARGS)

test-te:
	@REQUIRE_TE=1 scripts/test.sh te -- $(ARGS)

# Long tests too, and many more draws of hypothesis; the limits are for a hang, not for a long test.
test-full:
	@HYPOTHESIS_PROFILE=full scripts/test.sh light te -- -m "" --timeout=3600 -o faulthandler_timeout=3700 $(ARGS)

demo:
	@scripts/demo.sh
