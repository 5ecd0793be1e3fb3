# make: the host library. make ARCH=sm_90: with CUDA. MODEL=file.bin bakes that model's shape in; without it,
# native/config.h's defaults. DEFINES=-DMAX_BATCH=64 raises a capacity.
ARCHS   := host sm_80 sm_86 sm_89 sm_90 sm_100 sm_120
ARCH    := host
MODEL   :=
$(if $(filter $(ARCHS:%=[%]),[$(ARCH)]),,$(error ARCH=$(ARCH): expected one of $(ARCHS)))
NAMES   := $(shell sed -n 's/^.ifndef //p' native/config.h | grep -v -e ^COLIBRI_ -e ^CUDA_ARCH | paste -sd'|')
WRONG   := $(shell printf '%s\n' '$(subst ','\'',$(DEFINES))' | tr ' ' '\n' | awk -F= '$$0 != "" && ($$0 !~ /^-D($(NAMES))=(0|[1-9][0-9]*)$$/ || seen[$$1]++)')
$(if $(WRONG),$(error DEFINES: $(WRONG), expected -DNAME=VALUE, as in DEFINES=-DMAX_BATCH=64, with a VALUE of digits and a NAME, once, of $(subst |, ,$(NAMES))))
PYTHON  := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
CONFIG  := $(strip $(if $(MODEL),$(shell $(PYTHON) -m colibri.build --defines '$(subst ','\'',$(MODEL))')) $(DEFINES))
$(if $(filter-out 0,$(if $(MODEL),$(.SHELLSTATUS))),$(error MODEL=$(MODEL): cannot read its shape))
BUILD   := build/$(ARCH)-$(shell printf '%s' '$(CONFIG)' | sha256sum | cut -c1-12)
NUMBER  := $(ARCH:sm_%=%)
CUDA    := $(if $(filter sm_%,$(ARCH)),$(wildcard native/cuda/*.cu))
OBJECTS := $(patsubst native/%,$(BUILD)/%.o,$(wildcard native/*.c native/host/*.c) $(CUDA))
HEADERS := $(shell cat native/*.h | sha256sum | cut -c1-12)
FLAGS   := -O3 -Inative -MMD -MP $(CONFIG) $(if $(CUDA),-DCUDA_ARCH=$(NUMBER))
WHOLE    = -MF $(@:.o=.d) -MT $@ -c -o $@.$$$$ $< && mv $@.$$$$ $@
TARGET  := $(NUMBER:90=90a)
$(BUILD)/libcolibri.so: $(OBJECTS)
	$(if $(CUDA),nvcc -cudart static -Xcompiler -fopenmp,gcc -fopenmp) -shared -o $@.$$$$ $^ -lm && mv $@.$$$$ $@
$(BUILD)/%.c.o: native/%.c ; @mkdir -p $(@D)
	gcc -std=gnu11 -Wall -Wextra -Werror -Wno-aggressive-loop-optimizations -fPIC -fvisibility=hidden -ffp-contract=off -fopenmp -DHEADERS='"$(HEADERS)"' $(FLAGS) $(WHOLE)
$(BUILD)/%.cu.o: native/%.cu ; @mkdir -p $(@D)
	nvcc -std=c++17 -Xcompiler -Wall,-Wextra,-Werror,-fPIC,-fopenmp,-fvisibility=hidden -Werror all-warnings -gencode arch=compute_$(TARGET),code=sm_$(TARGET) $(FLAGS) $(WHOLE)
.venv/installed: setup.cfg ; python3 -m venv .venv && .venv/bin/pip install -q -e .[test] && touch $@
run: .venv/installed ; .venv/bin/python -m converter models/moe-32.pt moe-32.bin --force && .venv/bin/python -m colibri.run --model moe-32.bin --prompt "It was the custom of the old captain, "
test: .venv/installed ; .venv/bin/python -m pytest tests
bench: .venv/installed ; .venv/bin/python -m bench.latency && bench/stress.sh 20
clean: ; rm -rf build
.PHONY: run test bench clean
-include $(OBJECTS:.o=.d)
