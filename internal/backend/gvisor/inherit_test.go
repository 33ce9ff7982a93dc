package gvisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Children that are started while control sockets are made get none of them.
func TestChildrenInheritNoControlSocket(t *testing.T) {
	dir := t.TempDir()
	stop := make(chan struct{})
	var makers sync.WaitGroup
	for i := range 4 {
		makers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				path := filepath.Join(dir, string(rune('a'+i)))
				fd, err := listenControl(path)
				if err != nil {
					t.Error(err)
					return
				}
				if err := unix.Listen(fd, 1); err != nil {
					t.Error(err)
				}
				c, err := dialControl(path)
				if err != nil {
					t.Error(err)
				} else {
					c.Close()
				}
				unix.Close(fd)
				os.Remove(path)
			}
		})
	}
	for range 200 {
		out, err := exec.Command("ls", "-l", "/proc/self/fd").Output()
		if err != nil {
			t.Fatal(err)
		}
		if s := string(out); strings.Contains(s, "socket:") || strings.Contains(s, "eventfd") {
			t.Errorf("a child got\n%s", s)
			break
		}
	}
	close(stop)
	makers.Wait()
}
