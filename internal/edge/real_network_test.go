package edge

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/netgate/gatetest"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// onItsOwn runs a test in a process with a network namespace that stands for a
// node's, and reports whether this is that process.
func onItsOwn(t *testing.T) bool {
	t.Helper()
	const variable = "OPENDSEC_TEST_NODE"
	if os.Getenv(variable) != "" {
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=5m")
	cmd.Env = append(os.Environ(), variable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	} else {
		t.Logf("%s", out)
	}
	return false
}

// networked makes a sandbox with rules and the prober in it.
func (n *realNode) networked(backend sandbox.Backend, rules map[string]bool) sandbox.ID {
	n.t.Helper()
	n.backend = backend
	req := n.request(sandbox.NewID())
	req.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: rules}
	if _, err := n.client.CreateSandbox(n.t.Context(), connect.NewRequest(req)); err != nil {
		n.t.Fatal(err)
	}
	id := sandbox.ID(req.GetId())
	n.upload(id, n.prober(), "/srv/prober")
	return id
}

// prober builds the program that tries to get around network rules.
func (n *realNode) prober() string {
	n.t.Helper()
	bin := filepath.Join(n.dir, "prober")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "github.com/kernflux/opendsec/internal/netgate/gatetest/prober")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("build the prober: %v\n%s", err, out)
	}
	return bin
}

// upload puts a program into a sandbox.
func (n *realNode) upload(id sandbox.ID, from, to string) {
	n.t.Helper()
	content, err := os.ReadFile(from)
	if err != nil {
		n.t.Fatal(err)
	}
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	part, err := w.CreateFormFile("file", to)
	if err != nil {
		n.t.Fatal(err)
	}
	part.Write(content)
	w.Close()
	res, err := n.http.Post(n.url+"/sandboxes/"+string(id)+"/files?username=root&path="+to, w.FormDataContentType(), &body)
	if err != nil {
		n.t.Fatal(err)
	}
	defer res.Body.Close()
	if told, _ := io.ReadAll(res.Body); res.StatusCode != http.StatusOK {
		n.t.Fatalf("upload: %s %s", res.Status, told)
	}
	n.shell(id, "/bin/busybox chmod 755 "+to, io.Discard)
}

// probe runs the prober; works says whether it must find that all is well.
func (n *realNode) probe(id sandbox.ID, mode string, works bool) {
	n.t.Helper()
	var out bytes.Buffer
	if exit := n.shell(id, "/srv/prober "+mode+" 2>&1", &out); (exit == 0) != works {
		n.t.Errorf("prober %s in %s ended with %d:\n%s", mode, id, exit, out.String())
	} else {
		n.t.Logf("prober %s: %s", mode, lastLine(out.String()))
	}
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

func (n *realNode) update(id sandbox.ID, rules map[string]bool) error {
	_, err := n.client.UpdateNetwork(n.t.Context(), connect.NewRequest(&edgev1.UpdateNetworkRequest{Id: string(id), NetworkRules: rules}))
	return err
}

func (n *realNode) mustUpdate(id sandbox.ID, rules map[string]bool) {
	n.t.Helper()
	if err := n.update(id, rules); err != nil {
		n.t.Fatal(err)
	}
}

func (n *realNode) mustPause(id sandbox.ID) {
	n.t.Helper()
	if _, err := n.pauseID(id); err != nil {
		n.t.Fatalf("pause: %v", err)
	}
}

func noBypass(t *testing.T, w *gatetest.World) {
	t.Helper()
	for _, b := range w.Bypasses() {
		t.Errorf("got through: %s", b)
	}
}

// The same attempts from a real machine of each kind, and rules over its life.
func TestRealNetwork(t *testing.T) {
	if !onItsOwn(t) {
		return
	}
	w := gatetest.New(t)
	n := newRealNode(t)
	for _, backend := range []sandbox.Backend{sandbox.Container, sandbox.GVisor} {
		id := n.networked(backend, gatetest.Rules())
		n.probe(id, "", true)
		noBypass(t, w)
		n.probe(id, "allowed", true)

		// Live.
		n.mustUpdate(id, nil)
		n.probe(id, "again", false)
		n.mustUpdate(id, gatetest.Rules())
		n.probe(id, "allowed", true)

		// After a pause, and a change while it is paused.
		n.mustPause(id)
		n.mustUpdate(id, map[string]bool{gatetest.Networks: true})
		n.mustResume(id)
		n.probe(id, "again", false)
		n.mustUpdate(id, gatetest.Rules())
		n.probe(id, "allowed", true)
		denied := n.denied(id)
		n.mustPause(id)
		n.wantDenied(id, denied)
		n.mustResume(id)
		n.wantDenied(id, denied)
		n.probe(id, "again", true)

		// After the edge was killed, once it had time to note where names led.
		n.probe(id, "allowed", true)
		waitForPins(n, id)
		denied = n.denied(id)
		waitForDenied(n, id, denied.GetTotal())
		n.kill9()
		n.launch()
		n.wantDenied(id, denied)
		n.probe(id, "again", true)
		n.probe(id, "", true)

		if backend == sandbox.GVisor {
			req := n.request(sandbox.NewID())
			req.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: gatetest.Rules()}
			res, err := n.client.ForkSandbox(t.Context(), connect.NewRequest(&edgev1.ForkSandboxRequest{Id: string(id), Children: []*edgev1.CreateSandboxRequest{req}}))
			if err != nil || res.Msg.GetResults()[0].GetError() != nil {
				t.Fatalf("fork: %v, %v", res, err)
			}
			n.probe(sandbox.ID(req.GetId()), "again", true)
			n.mustUpdate(sandbox.ID(req.GetId()), nil)
			n.probe(sandbox.ID(req.GetId()), "again", false)
			n.probe(id, "again", true) // the source has rules of its own
			n.kill(t, sandbox.ID(req.GetId()))
		}
		n.noLeaks([]string{string(id)})
		n.kill(t, id)
		noBypass(t, w)
	}
}

func (n *realNode) denied(id sandbox.ID) *edgev1.ListDeniedResponse {
	n.t.Helper()
	res, err := n.client.ListDenied(n.t.Context(), connect.NewRequest(&edgev1.ListDeniedRequest{Id: string(id)}))
	if err != nil {
		n.t.Fatal(err)
	}
	return res.Msg
}

// wantDenied checks that the edge knows what was denied before, and nothing that
// was not.
func (n *realNode) wantDenied(id sandbox.ID, before *edgev1.ListDeniedResponse) {
	n.t.Helper()
	now := n.denied(id)
	if len(before.GetDenials()) < 10 || len(now.GetDenials()) != len(before.GetDenials()) || now.GetTotal() != before.GetTotal() {
		n.t.Errorf("%d denials, %d in all; it was %d, %d in all", len(now.GetDenials()), now.GetTotal(), len(before.GetDenials()), before.GetTotal())
	}
	if metrics, err := n.client.GetMetrics(n.t.Context(), connect.NewRequest(&edgev1.GetMetricsRequest{Id: string(id)})); err == nil && metrics.Msg.GetMetrics().GetNetworkDenied() != now.GetTotal() {
		n.t.Errorf("the metrics count %d denials of %d", metrics.Msg.GetMetrics().GetNetworkDenied(), now.GetTotal())
	}
}

// waitForDenied returns when so many denials are on the disk.
func waitForDenied(n *realNode, id sandbox.ID, total uint64) {
	n.t.Helper()
	path := filepath.Join(n.dir, "state", "sandboxes", string(id), "denied.json")
	want := fmt.Sprintf(`"total":%d}`, total)
	for limit := time.Now().Add(10 * time.Second); ; <-time.After(10 * time.Millisecond) {
		text, err := os.ReadFile(path)
		if err == nil && strings.HasSuffix(string(text), want) {
			return
		}
		if time.Now().After(limit) {
			n.t.Fatalf("%d denials are not on the disk: %v", total, err)
		}
	}
}

// waitForPins returns when the journal says where names have led.
func waitForPins(n *realNode, id sandbox.ID) {
	n.t.Helper()
	path := filepath.Join(n.dir, "state", "sandboxes", string(id), "journal.json")
	for limit := time.Now().Add(10 * time.Second); ; <-time.After(10 * time.Millisecond) {
		text, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(text), `"good.wild.example"`) {
			return
		}
		if time.Now().After(limit) {
			n.t.Fatalf("the journal does not say where names have led: %s, %v", text, err)
		}
	}
}

// The edge is killed again and again while rules change and a sandbox tries
// all the time: what is never allowed never passes, and what was said to be
// closed is closed after the restart.
func TestRealNetworkSurvivesKills(t *testing.T) {
	if !onItsOwn(t) {
		return
	}
	w := gatetest.New(t)
	n := newRealNode(t)
	id := n.networked(sandbox.Container, nil)
	n.shell(id, "/srv/prober forever >/dev/null 2>&1 &", io.Discard)
	changes := 0
	for changes < 1000 {
		until := 50 + rand.IntN(150)
		for i := 0; ; i++ {
			if i == until { // while the next one is on its way
				go n.proc.Process.Kill()
			}
			rules := gatetest.Rules()
			if i%2 == 0 {
				rules = nil
			}
			if err := n.update(id, rules); err != nil {
				break
			}
			changes++
		}
		_ = n.proc.Wait() // killed, as it says
		n.launch()
		n.mustUpdate(id, nil)
		n.kill9()
		n.launch()
		n.probe(id, "again", false)
		noBypass(t, w)
	}
	t.Logf("%d changes", changes)
	n.mustUpdate(id, gatetest.Rules())
	n.probe(id, "allowed", true)
	n.noLeaks([]string{string(id)})
}
