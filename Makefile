# The library: for the host, or ARCH=sm_90; MODEL=file.bin bakes its shape in; DEFINES=-DMAX_BATCH=64 raises a capacity.
ARCH := host
MODEL :=
PYTHON := $(or $(wildcard .venv/bin/python),python3)
GIVEN := $(if $(filter command,$(origin CONFIG)),,$(foreach n,ARCH MODEL DEFINES,$n='$(subst ','\'',$(value $n))'))
CONFIG := $(if $(filter-out ARCH='host' M%='' D%='',$(GIVEN)),$(shell $(PYTHON) -m colibri.build --make $(GIVEN) 2>&1))
$(if $(filter-out 0,$(.SHELLSTATUS)),$(error $(CONFIG)))
BUILD := build/$(ARCH)-$(shell printf '%s' '$(CONFIG)' | sha256sum | cut -c1-12)
SM := $(patsubst sm_%,%,$(filter sm_%,$(ARCH)))
OBJECTS := $(patsubst native/%,$(BUILD)/%.o,$(wildcard native/*.c native/host/*.c $(if $(SM),native/cuda/*.cu)))
FLAGS := -O3 -Inative $(CONFIG) $(SM:%=-DCUDA_ARCH=%) -DHEADERS='"$(shell cat native/*.h | sha256sum | cut -c1-12)"'
GNU := -Wall -Wextra -Werror -fPIC -fopenmp -fvisibility=hidden
GCC := gcc -std=gnu11 $(GNU) -Wno-aggressive-loop-optimizations -ffp-contract=off
NVCC := nvcc -std=c++17 -Xcompiler "$(GNU)" -Werror all-warnings -gencode arch=compute_$(SM:90=90a),code=sm_$(SM:90=90a)
$(BUILD)/libcolibri.so: $(OBJECTS) ; $(if $(SM),nvcc,gcc) -shared -o $@.$$$$ $^ -lgomp -lm && mv $@.$$$$ $@
$(BUILD)/%.o: native/% ; @mkdir -p $(@D)
	$(if $(filter %.c,$<),$(GCC),$(NVCC)) $(FLAGS) -MMD -MP -MF $(@:.o=.d) -MT $@ -c -o $@.$$$$ $< && mv $@.$$$$ $@
.venv/installed: setup.cfg ; python3 deploy/install.py && touch $@
run: .venv/installed ; .venv/bin/python -m converter models/moe-32.pt moe-32.bin --force
	.venv/bin/python -m colibri.run --model moe-32.bin --prompt "It was the custom of the old captain, "
test: .venv/installed ; .venv/bin/python -m pytest tests
bench: .venv/installed ; .venv/bin/python -m bench.latency && bench/stress.sh 20
clean: ; rm -rf build
.PHONY: run test bench clean
-include $(OBJECTS:.o=.d)
