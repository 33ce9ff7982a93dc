package edge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// counting makes a sandbox with a loop that counts in its memory and writes
// each number to a file.
func (n *realNode) counting() sandbox.ID {
	n.t.Helper()
	id := n.create()
	n.shell(id, "(i=0; while :; do i=$((i+1)); echo $i >> /tmp/log; sleep 0.01; done) >/dev/null 2>&1 &", io.Discard)
	return id
}

// checkCount waits until the loop has gone on past least, checks that the file
// has every number once, and returns the last.
func (n *realNode) checkCount(id sandbox.ID, least int) int {
	n.t.Helper()
	var out bytes.Buffer
	n.shell(id, fmt.Sprintf("while [ $(tail -n 1 /tmp/log) -le %d ]; do sleep 0.01; done; cat /tmp/log", least), &out)
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	for i, line := range lines {
		if got, _ := strconv.Atoi(line); got != i+1 && i != len(lines)-1 { // the last may be half written
			n.t.Fatalf("sandbox %s: line %d of the file is %q", id, i+1, line)
		}
	}
	return len(lines) - 1
}

// stateOf returns how a sandbox is.
func (n *realNode) stateOf(id sandbox.ID) opendsecv1.State {
	n.t.Helper()
	for _, s := range n.sandboxes() {
		if s.GetId() == string(id) {
			return s.GetState()
		}
	}
	return opendsecv1.State_STATE_UNSPECIFIED
}

func (n *realNode) alive() []string {
	var ids []string
	for _, s := range n.sandboxes() {
		if s.GetState() == opendsecv1.State_STATE_RUNNING || s.GetState() == opendsecv1.State_STATE_PAUSED {
			ids = append(ids, s.GetId())
		}
	}
	return ids
}

func (n *realNode) mustResume(id sandbox.ID) {
	n.t.Helper()
	if _, err := n.resumeID(id); err != nil {
		n.t.Fatalf("resume: %v", err)
	}
}

// fork makes copies; errors are the caller's.
func (n *realNode) fork(id sandbox.ID, memory bool, count int) ([]sandbox.ID, error) {
	req := &edgev1.ForkSandboxRequest{Id: string(id), FilesOnly: !memory}
	var ids []sandbox.ID
	for range count {
		child := sandbox.NewID()
		ids = append(ids, child)
		req.Children = append(req.Children, n.request(child))
	}
	res, err := n.client.ForkSandbox(context.Background(), connect.NewRequest(req))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	for _, r := range res.Msg.GetResults() {
		if r.GetError() != nil {
			return ids, fmt.Errorf("a copy failed: %v", r.GetError())
		}
	}
	return ids, nil
}

func (n *realNode) snapshotID(id sandbox.ID, memory bool) (*opendsecv1.Image, error) {
	res, err := n.client.SnapshotSandbox(context.Background(), connect.NewRequest(&edgev1.SnapshotSandboxRequest{Id: string(id), FilesOnly: !memory}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg.GetImage(), nil
}

// dropImages removes all images but the first.
func (n *realNode) dropImages() {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := n.client.Watch(ctx, connect.NewRequest(&edgev1.WatchRequest{}))
	if err != nil || !stream.Receive() {
		n.t.Fatal(err, stream.Err())
	}
	defer stream.Close()
	for _, digest := range stream.Msg().GetNode().GetImages() {
		if digest == n.digest {
			continue
		}
		if _, err := n.client.DeleteImage(ctx, connect.NewRequest(&edgev1.DeleteImageRequest{Digest: digest})); err != nil {
			n.t.Error(err)
		}
	}
}

// The edge is killed at random moments of pauses, resumes, forks and snapshots.
// Nothing is lost, nothing is stuck, nothing leaks.
func TestRealKillDuringStateOperations(t *testing.T) {
	for _, name := range []sandbox.Backend{sandbox.GVisor, sandbox.Container} {
		t.Run(string(name), func(t *testing.T) {
			n := newRealNode(t)
			n.backend = name
			memory := name == sandbox.GVisor
			ids := []sandbox.ID{n.counting(), n.counting(), n.counting()}
			last := make([]int, len(ids))
			for range 25 {
				var wg sync.WaitGroup
				for i, id := range ids {
					wg.Go(func() { n.disturb(id, (i+rand.IntN(3))%3, memory) })
				}
				wg.Go(func() { n.disturb(ids[rand.IntN(len(ids))], rand.IntN(3), memory) })
				<-time.After(time.Duration(rand.IntN(250)) * time.Millisecond)
				n.kill9()
				wg.Wait()
				n.launch()
				for i, id := range ids {
					n.mustResume(id)
					last[i] = n.checkCount(id, last[i])
				}
				for _, other := range n.alive() {
					if !strings.Contains(fmt.Sprint(ids), other) {
						n.kill(t, sandbox.ID(other))
					}
				}
				n.dropImages()
				n.noLeaks([]string{string(ids[0]), string(ids[1]), string(ids[2])})
				if t.Failed() {
					return
				}
			}
		})
	}
}

// disturb does what a kill may interrupt; its errors say nothing.
func (n *realNode) disturb(id sandbox.ID, what int, memory bool) {
	switch what {
	case 0:
		_, _ = n.pauseID(id)
		_, _ = n.resumeID(id)
	case 1:
		_, _ = n.fork(id, memory, 2)
	case 2:
		_, _ = n.snapshotID(id, memory)
	}
}

// Paused and resumed again and again under load, every byte is right.
func TestRealFiftyPauses(t *testing.T) {
	for _, name := range []sandbox.Backend{sandbox.GVisor, sandbox.Container} {
		t.Run(string(name), func(t *testing.T) {
			n := newRealNode(t)
			n.backend = name
			id := n.counting()
			last := 0
			for range 50 {
				if _, err := n.pauseID(id); err != nil {
					t.Fatal(err)
				}
				n.mustResume(id)
				last = n.checkCount(id, last)
			}
			n.noLeaks([]string{string(id)})
		})
	}
}

// Forks of one source side by side, each with its own life.
func TestRealParallelForks(t *testing.T) {
	n := newRealNode(t)
	n.backend = sandbox.GVisor
	id := n.counting()
	n.checkCount(id, 10)
	for range 3 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var all []sandbox.ID
		for range 8 {
			wg.Go(func() {
				ids, err := n.fork(id, true, 1)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				all = append(all, ids...)
			})
		}
		wg.Wait()
		names := map[string]bool{}
		for _, child := range all {
			n.checkCount(child, 10)
			var out bytes.Buffer
			n.shell(child, "cat /proc/sys/kernel/hostname /etc/machine-id /proc/sys/kernel/random/uuid; echo only > /tmp/mark", &out)
			for line := range strings.Lines(out.String()) {
				if names[line] {
					t.Errorf("%q came twice", line)
				}
				names[line] = true
			}
		}
		if exit := n.shell(id, "[ ! -e /tmp/mark ]", io.Discard); exit != 0 {
			t.Error("a copy's file is in the source")
		}
		for _, child := range all {
			n.kill(t, child)
		}
	}
	n.checkCount(id, 20)
	n.noLeaks([]string{string(id)})
}

// An image of a sandbox's state outlives the sandbox and is started from.
func TestRealSnapshots(t *testing.T) {
	for _, name := range []sandbox.Backend{sandbox.GVisor, sandbox.Container} {
		t.Run(string(name), func(t *testing.T) {
			n := newRealNode(t)
			n.backend = name
			memory := name == sandbox.GVisor
			id := n.counting()
			n.checkCount(id, 10)
			img, err := n.snapshotID(id, memory)
			if err != nil {
				t.Fatal(err)
			}
			n.kill(t, id)
			// Its plain image is deleted by name; the snapshot needs it.
			base := n.digest
			if memory {
				if _, err := n.client.DeleteImage(t.Context(), connect.NewRequest(&edgev1.DeleteImageRequest{Digest: base})); err != nil {
					t.Error(err)
				}
			}
			n.digest = img.GetDigest()
			for range 2 {
				child := n.create()
				if memory {
					n.checkCount(child, 10)
				} else if exit := n.shell(child, "[ $(tail -n 1 /tmp/log) -ge 10 ]", io.Discard); exit != 0 {
					t.Error("a file is missing")
				}
				if !memory {
					continue
				}
				// A copy of it, and a pause.
				if _, err := n.fork(child, true, 1); err != nil {
					t.Error(err)
				}
				if _, err := n.pauseID(child); err != nil {
					t.Error(err)
				}
				n.kill9()
				n.launch()
				n.mustResume(child)
				n.checkCount(child, 10)
			}
			for _, other := range n.alive() {
				n.kill(t, sandbox.ID(other))
			}
			n.dropImages()
			if _, err := n.client.DeleteImage(t.Context(), connect.NewRequest(&edgev1.DeleteImageRequest{Digest: n.digest})); err != nil {
				t.Error(err)
			}
			n.noLeaks(nil)
			if memory {
				if left, _ := filepath.Glob(filepath.Join(n.dir, "state/images/sha256/*")); len(left) != 0 {
					t.Errorf("images are left: %v", left)
				}
			}
		})
	}
}

// A disk without room refuses, and harms nothing; its space comes back.
func TestRealFullDisk(t *testing.T) {
	mount, err := os.MkdirTemp("/var/tmp", "opendsec-disk-")
	if err != nil {
		t.Fatal(err)
	}
	disk, dir := mount+".ext4", filepath.Join(mount, "node")
	for _, c := range [][]string{
		{"truncate", "-s", "800M", disk},
		{"mkfs.ext4", "-q", disk},
		{"mount", "-o", "loop", disk, mount},
		{"mkdir", dir},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", mount).CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		if err := errors.Join(os.Remove(mount), os.Remove(disk)); err != nil {
			t.Error(err)
		}
	})
	n := newRealNodeIn(t, dir)
	n.backend = sandbox.GVisor
	id := n.counting()
	n.shell(id, "dd if=/dev/urandom of=/dev/shm/fill bs=1M count=30 2>/dev/null", io.Discard)
	last := n.checkCount(id, 10)
	free := n.free()
	fill := filepath.Join(mount, "fill")
	if out, err := exec.Command("fallocate", "-l", strconv.FormatInt(free-(20<<20), 10), fill).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for what, try := range map[string]func() error{
		"pause":    func() error { _, err := n.pauseID(id); return err },
		"fork":     func() error { _, err := n.fork(id, true, 2); return err },
		"snapshot": func() error { _, err := n.snapshotID(id, true); return err },
	} {
		if err := try(); !fault.Is(err, fault.Capacity) {
			t.Errorf("%s: %v", what, err)
		}
		last = n.checkCount(id, last)
		if st := n.stateOf(id); st != opendsecv1.State_STATE_RUNNING {
			t.Errorf("%s left it %s", what, st)
		}
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	if _, err := n.pauseID(id); err != nil {
		t.Error(err)
	}
	n.mustResume(id)
	n.checkCount(id, last)
	if _, err := n.snapshotID(id, true); err != nil {
		t.Error(err)
	}
	n.kill(t, id)
	n.dropImages()
	n.noLeaks(nil)
	if now := n.free(); now < free {
		t.Errorf("%d bytes are free, %d were", now, free)
	}
}

// free returns the free bytes of the file system with the node's state.
func (n *realNode) free() int64 {
	n.t.Helper()
	out, err := exec.Command("df", "--output=avail", "-B1", n.dir).Output()
	if err != nil {
		n.t.Fatal(err)
	}
	f := strings.Fields(string(out))
	free, err := strconv.ParseInt(f[len(f)-1], 10, 64)
	if err != nil {
		n.t.Fatal(err)
	}
	return free
}

// A tree of forks, of which the first generations end while the edge is killed
// again and again: each leaf goes on with its own memory.
func TestRealForksOutliveTheirSources(t *testing.T) {
	n := newRealNode(t)
	n.backend = sandbox.GVisor
	root := n.counting()
	inner := []sandbox.ID{root}
	leaves := []sandbox.ID{root}
	for generation := range 3 {
		var next []sandbox.ID
		for _, id := range leaves {
			ids, err := n.fork(id, true, 2)
			if err != nil {
				t.Fatalf("generation %d: %v", generation, err)
			}
			next = append(next, ids...)
			if generation == 1 {
				n.kill9()
				n.launch()
			}
		}
		if generation > 0 {
			inner = append(inner, leaves...)
		}
		leaves = next
	}
	last := make([]int, len(leaves))
	for i, id := range leaves {
		last[i] = n.checkCount(id, 0)
	}
	rand.Shuffle(len(inner), func(i, j int) { inner[i], inner[j] = inner[j], inner[i] })
	for k, id := range inner {
		n.kill(t, id)
		if k%2 == 0 {
			n.kill9()
			n.launch()
		}
		for i, id := range leaves {
			last[i] = n.checkCount(id, last[i])
		}
	}
	// One is put away and comes back with memory of its own.
	if _, err := n.pauseID(leaves[0]); err != nil {
		t.Fatal(err)
	}
	n.mustResume(leaves[0])
	again, err := n.fork(leaves[0], true, 1)
	if err != nil {
		t.Fatal(err)
	}
	n.checkCount(again[0], last[0])
}
