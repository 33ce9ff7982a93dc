package backendtest

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// testBadRootfs makes machines of images that are none.
func testBadRootfs(e *env) {
	dir := e.TempDir()
	garbage := filepath.Join(dir, "garbage")
	if err := os.WriteFile(garbage, []byte(strings.Repeat("no image ", 10000)), 0o644); err != nil {
		e.Fatal(err)
	}
	for what, rootfs := range map[string]backend.Rootfs{
		"missing": {Digest: "sha256:0", EROFS: filepath.Join(dir, "missing"), Tree: filepath.Join(dir, "missing")},
		"garbage": {Digest: "sha256:1", EROFS: garbage, Tree: garbage},
	} {
		cfg := e.config(usual)
		cfg.Rootfs = rootfs
		e.refused("a rootfs that is "+what, cfg)
	}
	e.create(usual).works()
}

// testFullStateDir makes a machine on a file system that is full.
func testFullStateDir(e *env) {
	cfg := e.config(usual)
	if err := unix.Mount("tmpfs", cfg.StateDir, "tmpfs", 0, "size=8k"); err != nil {
		e.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(cfg.StateDir, 0); err != nil {
			e.Errorf("unmount the full state directory: %v", err)
		}
	}()
	e.refused("a full state directory", cfg)
}

// refused wants a create to fail and to leave nothing.
func (e *env) refused(why string, cfg backend.Config) {
	e.Helper()
	i, err := e.backend.Create(e.ctx, cfg)
	if err == nil {
		e.adopt(cfg, i).destroy()
		e.Errorf("a machine was made in spite of %s", why)
		return
	}
	e.Logf("%s: %v", why, err)
	e.release(cfg)
	e.checkEmpty(cfg)
	e.noLeftovers()
}

// testCycles makes and destroys many machines, and compares what this process
// holds before and after.
func testCycles(e *env) {
	const cycles = 50
	one := func() {
		m := e.create(usual)
		m.works()
		m.destroy()
	}
	one() // what is made once and kept is no leak
	e.quiet()
	goroutines, files := runtime.NumGoroutine(), openFiles()
	for range cycles {
		one()
	}
	e.notGrown(cycles, goroutines, files)
	e.noLeftovers()
}

// notGrown compares what this process holds with what it held before as many
// machines as cycles, all of which but the last are gone.
func (e *env) notGrown(cycles, goroutines int, files []string) {
	e.Helper()
	e.made = slices.DeleteFunc(e.made, func(m *machine) bool { return m.gone })
	var now []string
	grown := e.settled(func() []string {
		now = openFiles()
		if runtime.NumGoroutine() <= goroutines+5 && len(now) <= len(files)+8 {
			return nil
		}
		return []string{"grown"}
	})
	if len(grown) > 0 {
		stacks := make([]byte, 1<<20)
		e.Errorf("after %d machines: from %d to %d goroutines; open files (-before +after):\n%s\n%s", cycles,
			goroutines, runtime.NumGoroutine(), cmp.Diff(files, now), stacks[:runtime.Stack(stacks, true)])
	}
}

// quiet waits until what a machine's end has left to do in the background, such
// as the filling of pools, is done.
func (e *env) quiet() {
	before := -1
	for range 50 {
		<-time.After(50 * time.Millisecond)
		now := runtime.NumGoroutine() + len(openFiles())
		if now == before {
			return
		}
		before = now
	}
}
