package apiserver_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/sim"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edge"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/watcher"
)

// realEdge is the real edge over simulated machines.
type realEdge struct {
	c        *cluster
	stateDir string
	address  string
	stop     func()
}

// newRealCluster is newCluster with one node, which is a real edge.
func newRealCluster(t *testing.T) (*cluster, *realEdge) {
	t.Helper()
	c := newRecords(t)
	e := &realEdge{c: c, stateDir: filepath.Join(t.TempDir(), "edge"), address: "127.0.0.1:0"}
	if err := os.Mkdir(e.stateDir, 0o711); err != nil {
		t.Fatal(err)
	}
	e.start()
	t.Cleanup(func() { e.stop() })
	c.start([]watcher.Node{{Name: "node-1", Address: e.address}})
	return c, e
}

// start runs the edge on its directory, where it finds what an earlier one left.
func (e *realEdge) start() {
	e.c.t.Helper()
	log := slog.New(slog.DiscardHandler)
	machines := sim.Open(log, sim.Behavior{})
	node := edge.New(edge.Config{Name: "node-1", StateDir: e.stateDir, AgentPath: "/agent", DiskReserveMB: 1},
		edge.Deps{Backends: []backend.Backend{machines}, Images: pictures{}, Slots: &slots{}, Log: log})
	l, err := net.Listen("tcp", e.address)
	if err != nil {
		e.c.t.Fatal(err)
	}
	e.address = l.Addr().String()
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.c.t.Context()))
	var group sync.WaitGroup
	group.Go(func() {
		if err := node.Run(ctx); err != nil {
			e.c.t.Error(err)
		}
	})
	id := e.c.identity(mtls.RoleEdge)
	group.Go(func() {
		err := daemon.Serve(ctx, daemon.Server{Listener: l, TLS: id.ServerConfig(), Handler: node.Handler(), Log: log, Grace: time.Nanosecond})
		if err != nil {
			e.c.t.Error(err)
		}
	})
	e.stop = sync.OnceFunc(func() {
		cancel()
		group.Wait()
		if err := machines.Close(); err != nil {
			e.c.t.Error(err)
		}
	})
}

// slots are network slots that are only names.
type slots struct{ count atomic.Int64 }

func (s *slots) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (s *slots) Release(backend.Slot)          {}
func (s *slots) Holds(string) bool             { return false }
func (s *slots) Acquire(context.Context) (backend.Slot, error) {
	return backend.Slot{Name: fmt.Sprintf("slot-%d", s.count.Add(1))}, nil
}

// pictures are images that are only digests.
type pictures struct{}

func (pictures) Acquire(_ context.Context, digest string) (backend.Rootfs, image.Artifact, error) {
	return backend.Rootfs{Digest: digest}, image.Artifact{Digest: digest}, nil
}
func (pictures) Release(string)                    {}
func (pictures) List() ([]image.Artifact, error)   { return nil, nil }
func (pictures) Delete(string) error               { return nil }
func (pictures) Dir(digest string) (string, error) { return digest, nil }
func (pictures) Sweep() error                      { return nil }
func (pictures) Begin() (*image.Draft, error)      { return nil, io.ErrUnexpectedEOF }
func (pictures) Get(digest string) (image.Artifact, error) {
	return image.Artifact{Digest: digest}, nil
}

func (pictures) Pack(context.Context, image.PackOptions) (image.Artifact, error) {
	return image.Artifact{}, io.ErrUnexpectedEOF
}
func (pictures) Import(context.Context, image.ImportOptions, func(image.Progress)) (image.Artifact, error) {
	return image.Artifact{}, io.ErrUnexpectedEOF
}

func (pictures) Bootstrap(context.Context, image.BootstrapOptions, func(image.Progress)) (image.Artifact, error) {
	return image.Artifact{}, io.ErrUnexpectedEOF
}

func onSim(r *opendsecv1.CreateSandboxRequest) { r.Spec.Backend = "sim" }

func TestRealEdgeFromCreateToStop(t *testing.T) {
	c, _ := newRealCluster(t)
	dev := c.developer()
	sb := dev.mustCreate(onSim)
	base := c.url + "/sandboxes/" + sb.GetId()

	// A command, through API and edge to the agent, over a stream.
	commands := processconnect.NewProcessClient(c.http, base, connect.WithInterceptors(bearer(dev.token)))
	stream, err := commands.Start(t.Context(), connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Args: []string{"-c", "true"}}}))
	if err != nil {
		t.Fatal(err)
	}
	ended := false
	for stream.Receive() {
		ended = ended || stream.Msg().GetEvent().GetEnd() != nil
	}
	if err := stream.Err(); err != nil || !ended {
		t.Errorf("the command's stream: %v, ended %v", err, ended)
	}

	// A file there and back.
	var form bytes.Buffer
	parts := multipart.NewWriter(&form)
	part, err := parts.CreateFormFile("file", "/tmp/a")
	if err != nil {
		t.Fatal(err)
	}
	content := bytes.Repeat([]byte("\x00\xffé"), 100000)
	if _, err := part.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := parts.Close(); err != nil {
		t.Fatal(err)
	}
	req := dev.request(t.Context(), sb.GetId(), "/files?path=/tmp/a&username=root", &form)
	req.Header.Set("Content-Type", parts.FormDataContentType())
	res, err := c.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatalf("upload: %d %s", res.StatusCode, answer)
	}
	req = dev.request(t.Context(), sb.GetId(), "/files?path=/tmp/a&username=root", nil)
	req.Method = http.MethodGet
	if res, err = c.http.Do(req); err != nil {
		t.Fatal(err)
	}
	back, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || !bytes.Equal(back, content) {
		t.Errorf("got %d bytes back (%v), sent %d", len(back), err, len(content))
	}

	if _, err := dev.sandboxes.RefreshSandbox(t.Context(), connect.NewRequest(&opendsecv1.RefreshSandboxRequest{Id: sb.GetId()})); err != nil {
		t.Error(err)
	}
	if _, err := dev.sandboxes.GetMetrics(t.Context(), connect.NewRequest(&opendsecv1.GetMetricsRequest{Id: sb.GetId()})); err != nil {
		t.Error(err)
	}
	if stopped, err := dev.stop(sb.GetId()); err != nil || stopped.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("got %v, %v", stopped, err)
	}
}

func TestRealEdgeKeepsDeadlines(t *testing.T) {
	c, _ := newRealCluster(t)
	dev := c.developer()
	for reason, change := range map[string]func(*opendsecv1.CreateSandboxRequest){
		"idle":     func(r *opendsecv1.CreateSandboxRequest) { r.Spec.TtlRunningStop = durationpb.New(time.Second) },
		"lifetime": func(r *opendsecv1.CreateSandboxRequest) { r.Spec.TtlLifetime = durationpb.New(time.Second) },
	} {
		sb := dev.mustCreate(onSim, change)
		eventually(t, "its end is recorded", func() bool {
			got, err := dev.get(sb.GetId())
			if err != nil {
				t.Fatal(err)
			}
			if end := got.GetEnd(); end != nil {
				if end.GetReason() != reason || end.GetDomain() != opendsecv1.Domain_DOMAIN_POLICY || got.GetState() != opendsecv1.State_STATE_STOPPED {
					t.Errorf("got %v; want %s", got, reason)
				}
				return true
			}
			return false
		})
	}
}

// A restart of the edge is not an outage of its sandboxes.
func TestRealEdgeRestarts(t *testing.T) {
	c, e := newRealCluster(t)
	dev := c.developer()
	sb := dev.mustCreate(onSim)
	e.stop()
	if got, err := dev.get(sb.GetId()); err != nil || got.GetState() != opendsecv1.State_STATE_RUNNING {
		t.Errorf("while its edge is away: %v, %v", got, err)
	}
	e.start()
	eventually(t, "its agent answers again", func() bool { return dev.data(sb.GetId(), "/agent.v1.Agent/Activity") == nil })
	if got, err := dev.get(sb.GetId()); err != nil || got.GetState() != opendsecv1.State_STATE_RUNNING {
		t.Errorf("after the restart: %v, %v", got, err)
	}
	if stopped, err := dev.stop(sb.GetId()); err != nil || stopped.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("got %v, %v", stopped, err)
	}
}

// upload writes a file in a sandbox; download reads it.
func (u *user) upload(id, path, content string) error {
	var form bytes.Buffer
	parts := multipart.NewWriter(&form)
	part, err := parts.CreateFormFile("file", path)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(part, content); err != nil {
		return err
	}
	if err := parts.Close(); err != nil {
		return err
	}
	req := u.request(u.c.t.Context(), id, "/files?username=root&path="+path, &form)
	req.Header.Set("Content-Type", parts.FormDataContentType())
	_, err = u.fetch(req)
	return err
}

func (u *user) download(id, path string) (string, error) {
	req := u.request(u.c.t.Context(), id, "/files?username=root&path="+path, nil)
	req.Method = http.MethodGet
	return u.fetch(req)
}

func (u *user) fetch(req *http.Request) (string, error) {
	res, err := u.c.http.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", res.Status, body)
	}
	return string(body), err
}

// What a sandbox has outlives pauses, restarts of its edge and forks.
func TestRealEdgeKeepsState(t *testing.T) {
	c, e := newRealCluster(t)
	dev := c.developer()
	id := dev.mustCreate(onSim).GetId()
	if err := dev.upload(id, "/tmp/a", "first"); err != nil {
		t.Fatal(err)
	}
	dev.mustPause(id)
	e.stop()
	dev.is(id, paused)
	e.start()
	eventually(t, "its edge is back", func() bool {
		_, err := dev.pause(id)
		return err == nil
	})
	if _, err := dev.download(id, "/tmp/a"); err == nil || !strings.Contains(err.Error(), "wrong_state") {
		t.Errorf("a call to a paused sandbox: %v", err)
	}
	eventually(t, "it is resumed", func() bool {
		sb, err := dev.resume(id)
		return err == nil && sb.GetState() == running
	})
	if got, err := dev.download(id, "/tmp/a"); err != nil || got != "first" {
		t.Errorf("got %q, %v", got, err)
	}
	for _, change := range []func(*opendsecv1.ForkSandboxRequest){
		func(*opendsecv1.ForkSandboxRequest) {}, func(r *opendsecv1.ForkSandboxRequest) { r.FilesOnly = true },
	} {
		results, err := dev.fork(id, times(3), change)
		if err != nil {
			t.Fatal(err)
		}
		ids, kinds := sortResults(t, results)
		if len(ids) != 3 {
			t.Fatalf("made %v, and %v", ids, kinds)
		}
		for _, child := range ids {
			if got, err := dev.download(child, "/tmp/a"); err != nil || got != "first" {
				t.Errorf("got %q, %v", got, err)
			}
			if err := dev.upload(child, "/tmp/a", child); err != nil {
				t.Error(err)
			}
		}
	}
	if got, err := dev.download(id, "/tmp/a"); err != nil || got != "first" {
		t.Errorf("after the copies wrote, the source has %q, %v", got, err)
	}
	dev.mustPause(id)
	results, err := dev.fork(id)
	if ids, _ := sortResults(t, results); err != nil || len(ids) != 1 {
		t.Errorf("of a paused one: %v, %v", results, err)
	}
	dev.is(id, paused)
	if sb, err := dev.stop(id); err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("got %v, %v", sb, err)
	}
	leaks, err := c.admin().cluster.FindLeaks(t.Context(), connect.NewRequest(&opendsecv1.FindLeaksRequest{}))
	if err != nil || len(leaks.Msg.GetLeaks()) > 0 {
		t.Errorf("leaks: %v, %v", leaks, err)
	}
}

// A sandbox may pause by itself, and be woken by whoever calls it.
func TestRealEdgePausesAndWakes(t *testing.T) {
	c, _ := newRealCluster(t)
	dev := c.developer()
	id := dev.mustCreate(onSim, func(r *opendsecv1.CreateSandboxRequest) {
		r.Spec.AutoResume, r.Spec.OnIdle, r.Spec.TtlRunningStop = true, opendsecv1.OnIdle_ON_IDLE_PAUSE, durationpb.New(time.Second)
	}).GetId()
	for range 2 {
		eventually(t, "it pauses by itself", func() bool {
			sb, err := dev.get(id)
			return err == nil && sb.GetState() == paused && sb.GetPausedAt() != nil
		})
		if err := dev.data(id, "/agent.v1.Agent/Activity"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "that it was woken is recorded", func() bool {
			sb, err := dev.get(id)
			return err == nil && sb.GetState() == running
		})
	}
}

// Pauses, resumes and forks at once leave record and node in agreement.
func TestRealEdgeStateAtOnce(t *testing.T) {
	c, _ := newRealCluster(t)
	dev := c.developer()
	tiny := func(r *opendsecv1.CreateSandboxRequest) {
		r.Spec.MemoryLimitMb, r.Spec.DiskLimitMb, r.Spec.CpuCoresLimit = 64, 16, 0.1
	}
	id := dev.mustCreate(onSim, tiny).GetId()
	var group sync.WaitGroup
	for i := range 24 {
		group.Go(func() {
			switch i % 3 {
			case 0:
				if _, err := dev.pause(id); err != nil {
					t.Error(err)
				}
			case 1:
				if _, err := dev.resume(id); err != nil {
					t.Error(err)
				}
			case 2:
				results, err := dev.fork(id)
				if ids, kinds := sortResults(t, results); err != nil || len(ids) != 1 {
					t.Errorf("fork: %v, %v", kinds, err)
				}
			}
		})
	}
	group.Wait()
	dev.mustPause(id)
	dev.mustResume(id)
	if err := dev.data(id, "/agent.v1.Agent/Activity"); err != nil {
		t.Error(err)
	}
	if n := len(c.copiesOf(id)); n != 8 {
		t.Errorf("%d copies", n)
	}
}

func TestRealEdgeManyAtOnce(t *testing.T) {
	c, _ := newRealCluster(t)
	dev, admin := c.developer(), c.admin()
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			sb, err := dev.create(onSim, func(r *opendsecv1.CreateSandboxRequest) {
				r.Spec.MemoryLimitMb = 64
				r.Spec.DiskLimitMb = 16
				r.Spec.CpuCoresLimit = 0.1
			})
			if err != nil {
				t.Error(err)
				return
			}
			if err := dev.data(sb.GetId(), "/agent.v1.Agent/Activity"); err != nil {
				t.Error(err)
			}
			if stopped, err := dev.stop(sb.GetId()); err != nil || stopped.GetEnd() == nil {
				t.Errorf("got %v, %v", stopped, err)
			}
		})
	}
	group.Wait()
	status, err := admin.cluster.GetStatus(t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
	if err != nil || status.Msg.GetNodes()[0].GetUsed().GetSandboxes() != 0 {
		t.Errorf("in use: %v, %v", status, err)
	}
	leaks, err := admin.cluster.FindLeaks(t.Context(), connect.NewRequest(&opendsecv1.FindLeaksRequest{}))
	if err != nil || len(leaks.Msg.GetLeaks()) > 0 {
		t.Errorf("leaks: %v, %v", leaks, err)
	}
}
