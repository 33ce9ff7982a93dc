package archtest

import (
	"path"
	"slices"
	"strings"
	"testing"
)

// layer is a step of the import direction: a package imports from its own
// layer and those below it only.
type layer int

const (
	words layer = iota
	contracts
	capabilities
	components
	programs
)

var layerNames = []string{"words", "contracts", "capabilities", "components", "programs"}

// placed says in which layer a package is. The longest prefix decides; a
// package that none fits fails the test, so that each new one is thought about.
var placed = map[string]layer{
	"internal/sandbox": words,
	"internal/fault":   words,
	"api/gen":          words, // generated from the contracts; fault's table of codes speaks it

	"internal/backend": contracts,
	"internal/mtls":    contracts,
	"internal/daemon":  contracts,
	"internal/rpc":     contracts,

	"internal/backend/":    capabilities,
	"internal/agent":       capabilities,
	"internal/ahead":       capabilities,
	"internal/agentclient": capabilities,
	"internal/ca":          capabilities,
	"internal/cgroup":      capabilities,
	"internal/durable":     capabilities,
	"internal/edgetest":    capabilities, // an edge for tests, without the real one
	"internal/iam/role":    capabilities,
	"internal/ingress":     capabilities,
	"internal/iam/token":   capabilities,
	"internal/image":       capabilities,
	"internal/machine":     capabilities,
	"internal/netgate":     capabilities,
	"internal/netpolicy":   capabilities,
	"internal/netslot":     capabilities,
	"internal/ocispec":     capabilities,
	"internal/reflink":     capabilities,
	"internal/store":       capabilities,
	"internal/takeover":    capabilities,
	"internal/tunnel":      capabilities,

	"internal/apiserver": components,
	"internal/ctl":       components,
	"internal/e2b":       components,
	"internal/edge":      components,
	"internal/iam":       components,
	"internal/watcher":   components,

	"internal/archtest": programs,
	"internal/program":  programs, // wires the servers
	"internal/testenv":  programs, // starts components for tests
	"cmd":               programs,
	"test":              programs,
}

// place returns the layer of a package and the prefix that put it there.
func place(pkg string) (layer, string, bool) {
	best := ""
	for prefix := range placed {
		fits := pkg == strings.TrimSuffix(prefix, "/") && !strings.HasSuffix(prefix, "/") ||
			strings.HasPrefix(pkg, strings.TrimSuffix(prefix, "/")+"/")
		if fits && len(prefix) > len(best) {
			best = prefix
		}
	}
	return placed[best], best, best != ""
}

func ours(pkg string) bool {
	return strings.HasPrefix(pkg, "internal/") || strings.HasPrefix(pkg, "api/") || strings.HasPrefix(pkg, "cmd/")
}

func TestImportsGoDownward(t *testing.T) {
	unplaced := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() { // a test may bring the real neighbours
			continue
		}
		from, fromPrefix, ok := place(s.pkg)
		if !ok {
			if !unplaced[s.pkg] {
				t.Errorf("%s is in no layer: add it to the table", s.pkg)
			}
			unplaced[s.pkg] = true
			continue
		}
		for _, imp := range s.imports() {
			if !ours(imp) {
				continue
			}
			to, toPrefix, _ := place(imp)
			switch {
			case to > from:
				t.Errorf("%s (%s) imports %s (%s): imports go downward, so that what is below can be read and tested alone",
					s.path, layerNames[from], imp, layerNames[to])
			case from == components && to == components && fromPrefix != toPrefix:
				t.Errorf("%s imports %s: components meet over the wire only, so that each can run and fail by itself", s.path, imp)
			}
		}
	}
}

// kept lists imports that few packages may have, with the reason.
var kept = []struct {
	prefix string   // of the import
	only   []string // packages that may, with those below them
	tests  bool     // whether tests of other packages may
	why    string
}{
	{"gvisor.dev/gvisor", []string{"internal/backend/gvisor", "cmd/opendsec-sentry", "internal/ocispec"}, false,
		"gVisor's packages have no stable API: one place follows them at a pinned version"},
	{"database/sql", []string{"internal/store"}, true, "SQL is only in the store, so that both databases pass one suite"},
	{"modernc.org/sqlite", []string{"internal/store"}, false, "SQL is only in the store"},
	{"github.com/jackc/pgx", []string{"internal/store"}, false, "SQL is only in the store"},
	{"github.com/pressly/goose", []string{"internal/store"}, false, "migrations are the store's"},
	{"internal/store", []string{"internal/apiserver", "internal/watcher", "internal/iam", "internal/testenv", "internal/program"}, true,
		"the edge and the gateway hold no database credentials"},
	{"internal/iam/token", []string{"internal/iam", "internal/testenv"}, true, "only iam issues and checks tokens"},
	{"internal/ca", []string{"internal/testenv", "internal/program"}, true, "components show certificates and never make them"},
	{"github.com/google/go-containerregistry", []string{"internal/image"}, true, "image is the one place that knows how images are packed"},
	{"github.com/vishvananda", []string{"internal/netslot", "internal/netgate", "internal/backend", "internal/ocispec"}, true,
		"the host's network is changed in few places"},
	{"github.com/miekg/dns", []string{"internal/netpolicy"}, true, "DNS is spoken in one place"},
	{"github.com/spf13/cobra", []string{"internal/ctl", "cmd", "test/bench"}, false, "only the commands people type parse flags this way"},
	{"C", nil, false, "all is built without cgo: a dynamically linked sentry dies in its empty root"},
	{"github.com/stretchr/testify", nil, false, "the standard testing package and go-cmp are enough"},
}

func TestKeptImports(t *testing.T) {
	for _, s := range sources(t) {
		for _, imp := range s.imports() {
			for _, k := range kept {
				if imp != k.prefix && !strings.HasPrefix(imp, k.prefix+"/") || s.test() && k.tests {
					continue
				}
				if below(s.pkg, k.prefix) || slices.ContainsFunc(k.only, func(p string) bool { return below(s.pkg, p) }) {
					continue
				}
				t.Errorf("%s imports %s: %s", s.path, imp, k.why)
			}
		}
	}
}

func below(pkg, top string) bool { return pkg == top || strings.HasPrefix(pkg, top+"/") }

func TestWordsImportTheStandardLibraryOnly(t *testing.T) {
	for _, s := range sources(t) {
		if s.pkg != "internal/sandbox" {
			continue
		}
		for _, imp := range s.imports() {
			if strings.Contains(imp, ".") || ours(imp) {
				t.Errorf("%s imports %s: the vocabulary is imported by all and imports nothing", s.path, imp)
			}
		}
	}
}

// streams are files that do nothing but send messages as they come.
var streams = map[string]bool{"internal/edge/images.go": true, "internal/edge/watch.go": true}

// Generated types stop at the files that a component keeps for them, so that
// what a component decides is said in the project's own words.
func TestGeneratedTypesStopAtTheWire(t *testing.T) {
	for _, s := range sources(t) {
		if l, _, ok := place(s.pkg); !ok || l != components || s.test() {
			continue
		}
		if strings.HasPrefix(s.pkg, "internal/ctl") {
			continue // prints what the API gives, as it is
		}
		base := path.Base(s.path)
		if strings.HasPrefix(base, "rpc") || strings.HasPrefix(base, "convert") || streams[s.path] {
			continue
		}
		for _, imp := range s.imports() {
			if below(imp, "api/gen") && !strings.HasSuffix(imp, "connect") {
				t.Errorf("%s imports %s: a component keeps generated types in rpc*.go and convert*.go", s.path, imp)
			}
		}
	}
}

func TestTestingStaysInTests(t *testing.T) {
	for _, s := range sources(t) {
		if s.test() || s.pkg == "internal/testenv" || strings.HasSuffix(s.pkg, "test") {
			continue
		}
		if slices.Contains(s.imports(), "testing") {
			t.Errorf("%s imports testing: put it into a _test.go file, or into a package that ends in test", s.path)
		}
	}
}
