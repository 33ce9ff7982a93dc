package ctl_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/image/imagetest"
	"github.com/kernflux/opendsec/internal/program/install"
	"github.com/kernflux/opendsec/internal/testenv"
)

// installation is a whole installation that runs in this process.
type installation struct {
	*install.Installation
	vars [][2]string
	demo string // the demo caller's token

	mu   sync.Mutex // guards made
	made []string   // tokens
}

// env returns the environment of the admin, and where the things for scripts are.
func (in *installation) env() [][2]string { return in.vars }

func (in *installation) secret(s string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.made = append(in.made, s)
}

func (in *installation) secrets() []string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return append([]string(nil), in.made...)
}

// context limits what one run may take.
func (in *installation) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}

// start makes and runs an installation that ends with the test, and has
// imported an image for it, root/small.
func start(t *testing.T) *installation {
	bin, err := buildPrograms()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/var/tmp", "opendsec-ctl-") // t.TempDir may be on a file system that cannot hold machines
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	in := &installation{}
	in.Installation, err = install.Init(t.Context(), install.Setup{
		Ops: filepath.Join(dir, "ops"), State: filepath.Join(dir, "state"), Programs: bin,
		Listen: net.JoinHostPort("127.0.0.1", strconv.Itoa(testenv.FreePorts(t, 3))),
	})
	if err != nil {
		t.Fatal(err)
	}
	in.IAM.LogLevel, in.APIServer.LogLevel, in.Watcher.LogLevel, in.Edge.LogLevel = "warn", "warn", "warn", "warn"
	archive := filepath.Join(dir, "small.tar")
	imagetest.Busybox(t, archive, "sh", "cat", "echo", "sleep", "true", "id", "pwd", "env", "kill", "wc", "hostname")
	in.readEnv(t)
	in.vars = append(in.vars, [2]string{"PREFIX", backend.Prefix(in.Edge.StateDir)}, [2]string{"STATE", in.Edge.StateDir},
		[2]string{"NODE", in.Edge.Name}, [2]string{"SMALL", archive}, [2]string{"ADMIN_ENV", in.EnvFile()}, [2]string{"DEMO_TOKEN", in.demo})
	in.serve(t)
	r := &run{in: in}
	if code := r.main(in.get, "image", "import", "docker-archive:"+archive, "root/small"); code != 0 {
		t.Fatalf("import: %s", r.stderr.String())
	}
	return in
}

func (in *installation) get(name string) string {
	for _, v := range in.vars {
		if v[0] == name {
			return v[1]
		}
	}
	return ""
}

func (in *installation) readEnv(t *testing.T) {
	t.Helper()
	var err error
	if in.vars, err = install.ReadEnv(in.EnvFile()); err != nil {
		t.Fatal(err)
	}
	in.secret(in.get("OPENDSEC_TOKEN"))
	demo, err := install.ReadEnv(filepath.Join(in.Ops, "demo.env"))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range demo {
		if v[0] == "OPENDSEC_TOKEN" {
			in.demo = v[1]
			in.secret(v[1])
		}
	}
}

// serve runs the servers until the test's end, and returns when a node is healthy.
func (in *installation) serve(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	logR, logW := io.Pipe()
	go func() {
		ended <- in.Run(ctx, logW)
		logW.Close()
	}()
	logged := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(logR) // the pipe has no errors of its own
		logged <- string(b)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the servers ended: %v", err)
		}
		if log := <-logged; t.Failed() {
			t.Logf("the servers' log:\n%s", log)
		}
		if err := in.Edge.RemoveFromHost(); err != nil {
			t.Error(err)
		}
	})
	client, err := in.Admin()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.Now().Add(time.Minute); ; <-tick.C {
		res, err := client.Cluster.GetStatus(t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		if err == nil && len(res.Msg.GetNodes()) == 1 && res.Msg.GetNodes()[0].GetHealthy() {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("no healthy node: %v, %v", res, err)
		}
	}
}
