# OpenDsec: build, check and test. `make help` lists the targets.
SHELL := /bin/bash
.DELETE_ON_ERROR:

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo 0.0.0)
PREFIX  ?= /usr/local
BIN     := bin
PROGRAMS := opendsec opendsec-apiserver opendsec-iam opendsec-watcher opendsec-edge opendsecctl opendsec-agent
LDFLAGS := -s -w -X github.com/kernflux/opendsec/internal/daemon.Version=$(VERSION) -X main.version=$(VERSION)
# Builds the sentry with our changes of gVisor, and tells the version that snapshots carry.
SENTRY  := go run ./internal/backend/gvisor/patch/build
# A dynamically linked sentry dies in its chroot, so nothing here uses cgo.
export CGO_ENABLED := 0

VENV   := .venv
PYTHON := $(VENV)/bin/python

.PHONY: help build gen gen-check lint test test-python soak bench install clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build all programs into bin/
	@mkdir -p $(BIN)
	go build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ $(addprefix ./cmd/,$(PROGRAMS))
	$(SENTRY) -o $(BIN)/opendsec-sentry -ldflags '-s -w'

install: ## install the built programs below PREFIX
	install -d $(PREFIX)/lib/opendsec $(PREFIX)/bin
	install -m 0755 $(addprefix $(BIN)/,$(PROGRAMS) opendsec-sentry) $(PREFIX)/lib/opendsec/
	ln -sf $(PREFIX)/lib/opendsec/opendsec $(PREFIX)/bin/opendsec
	ln -sf $(PREFIX)/lib/opendsec/opendsecctl $(PREFIX)/bin/opendsecctl

tools: ## fetch the pinned generators and linters into bin/tools and .venv
	deploy/tools.sh

gen: tools ## generate code from api/*.proto and the sync SDK from the async one
	deploy/gen.sh

gen-check: tools ## fail when generated code is not what `make gen` makes
	deploy/gen.sh --check

lint: tools ## vet, staticcheck, ruff, mypy
	go vet ./...
	bin/tools/staticcheck ./...
	test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(VENV)/bin/ruff check sdk/python test
	$(VENV)/bin/ruff format --check sdk/python test
	cd sdk/python && ../../$(VENV)/bin/mypy

test: ## install what the tests need, then run all of them (as root)
	deploy/test.sh

soak: ## an hour of random forks, writes, snapshots and ends of up to eight machines (as root)
	OPENDSEC_TEST_SOAK=1h go test -timeout 2h -count=1 -v -run TestRandomForks ./internal/backend/gvisor

bench: build ## measure against runsc and runc; prints a table and writes bench.json
	deploy/bench.sh

clean: ## remove what was built
	rm -rf $(BIN) build $(VENV)
