package takeover

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// holder is a process that has the file open as a child has that was started
// before its parent was killed, until the returned function ends it.
func holder(t *testing.T, f *os.File) (end func()) {
	t.Helper()
	cmd := exec.Command("cat")
	cmd.ExtraFiles = []*os.File{f}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	return func() { in.Close() }
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Lock(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	end := holder(t, first)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path, 0); !errors.Is(err, ErrHeld) {
		t.Fatalf("a held lock was taken: %v", err)
	}
	begin := time.Now()
	if _, err := Lock(path, 3*again); !errors.Is(err, ErrHeld) || time.Since(begin) < 3*again {
		t.Fatalf("a held lock was not waited for: %v", err)
	}
	time.AfterFunc(3*again, end)
	second, err := Lock(path, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if _, err := Lock(filepath.Join(path, "none"), time.Minute); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("a path that cannot be: %v", err)
	}
}

func TestWaitForAPort(t *testing.T) {
	first, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := first.Addr().String()
	file, err := first.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	end := holder(t, file)
	if err := errors.Join(first.Close(), file.Close()); err != nil {
		t.Fatal(err)
	}
	var second net.Listener
	take := func() (err error) { second, err = net.Listen("tcp", addr); return err }
	if err := Wait(3*again, take, syscall.EADDRINUSE); !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("a port in use was taken: %v", err)
	}
	time.AfterFunc(3*again, end)
	if err := Wait(time.Minute, take, syscall.EADDRINUSE); err != nil {
		t.Fatal(err)
	}
	second.Close()
}
