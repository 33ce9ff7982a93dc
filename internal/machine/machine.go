// Package machine finds out what the machine it runs on can do, by trying:
// run a guest, clone a file, see the control groups. It knows nothing of
// sandboxes; doctor prints what it finds, quickstart and the edge act on it.
package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/reflink"
)

// Finding is one thing that was looked at.
type Finding struct {
	Name   string // "reflink"
	OK     bool
	Needed bool   // whether OpenDsec cannot run without it
	Detail string // what was found, or what is wrong and what to do
}

// Look examines this machine for an OpenDsec whose state is to be in stateDir,
// which need not exist yet.
func Look(stateDir string) []Finding {
	return []Finding{
		system(), root(), tool("runc", "runs the container backend", "runc"), tool("mkfs.erofs", "builds images", "erofs-utils"),
		filesystems(), cgroups(), memory(), disk(stateDir), clones(stateDir), kvm(),
		optionalTool("mmdebstrap", "builds a base image where no registry answers", "mmdebstrap"),
	}
}

func system() Finding {
	f := Finding{Name: "system", Needed: true, OK: runtime.GOOS == "linux" && runtime.GOARCH == "amd64"}
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		f.Detail = fmt.Sprintf("Linux %s, %s, %d processors", unix.ByteSliceToString(u.Release[:]), runtime.GOARCH, runtime.NumCPU())
	}
	if !f.OK {
		f.Detail = fmt.Sprintf("%s on %s; OpenDsec runs on Linux x86_64", runtime.GOOS, runtime.GOARCH)
	}
	return f
}

func root() Finding {
	if os.Geteuid() == 0 {
		return Finding{Name: "root", OK: true, Needed: true}
	}
	return Finding{Name: "root", Needed: true, Detail: "run this as root: making machines needs it"}
}

func tool(name, use, pkg string) Finding {
	path, err := exec.LookPath(name)
	if err != nil {
		return Finding{Name: name, Needed: true, Detail: fmt.Sprintf("not found (%s); apt-get install %s", use, pkg)}
	}
	return Finding{Name: name, OK: true, Needed: true, Detail: path}
}

func optionalTool(name, use, pkg string) Finding {
	f := tool(name, use, pkg)
	f.Needed = false
	return f
}

func filesystems() Finding {
	f := Finding{Name: "file systems", Needed: true}
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	have := map[string]bool{}
	for _, line := range strings.Split(string(b), "\n") {
		if w := strings.Fields(line); len(w) > 0 {
			have[w[len(w)-1]] = true
		}
	}
	var missing []string
	for _, name := range []string{"erofs", "overlay"} {
		// A module that is there is loaded at the first mount.
		if !have[name] && !moduleExists(name) {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		f.Detail = "this kernel lacks " + strings.Join(missing, " and ") + "; take one that has them (Linux 5.15 or newer)"
		return f
	}
	f.OK, f.Detail = true, "erofs, overlay"
	return f
}

func moduleExists(name string) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	found, err := filepath.Glob(filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:]), "kernel/fs", name+"*", name+".ko*"))
	return err == nil && len(found) > 0
}

func cgroups() Finding {
	f := Finding{Name: "cgroups", Needed: true}
	const dir = "/sys/fs/cgroup"
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		f.Detail = fmt.Sprintf("%s: %v; mount the control groups there", dir, err)
		return f
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		f.OK, f.Detail = true, "v2"
		return f
	}
	for _, name := range []string{"cpu", "memory", "pids"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			f.Detail = fmt.Sprintf("no %s controller under %s: limits cannot be enforced", name, dir)
			return f
		}
	}
	f.OK, f.Detail = true, "v1"
	if _, err := os.Stat(filepath.Join(dir, "unified")); err == nil {
		f.Detail = "v1 with an empty v2 (hybrid)"
	}
	return f
}

func memory() Finding {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return Finding{Name: "memory", Needed: true, Detail: err.Error()}
	}
	mb := uint64(info.Totalram) * uint64(info.Unit) >> 20
	f := Finding{Name: "memory", Needed: true, OK: mb >= 1500, Detail: fmt.Sprintf("%d MB", mb)}
	if !f.OK {
		f.Detail += "; at least 1500 MB are needed"
	}
	return f
}

// existing returns dir or the nearest directory above it that exists.
func existing(dir string) string {
	for {
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			return dir
		}
		dir = up
	}
}

func disk(stateDir string) Finding {
	f := Finding{Name: "disk", Needed: true}
	dir := existing(stateDir)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		f.Detail = fmt.Sprintf("%s: %v", dir, err)
		return f
	}
	mb := st.Bavail * uint64(st.Bsize) >> 20
	f.OK = mb >= 3000
	f.Detail = fmt.Sprintf("%d MB free for %s", mb, stateDir)
	if !f.OK {
		f.Detail += "; at least 3000 MB are needed"
	}
	return f
}

func clones(stateDir string) Finding {
	f := Finding{Name: "reflink"}
	ok, err := reflink.Supported(existing(stateDir))
	switch {
	case err != nil:
		f.Detail = err.Error()
	case !ok:
		f.Detail = fmt.Sprintf("the file system under %s has none: copies of container disks are real copies; put the state on XFS or btrfs, mounted at /data", stateDir)
	default:
		f.OK, f.Detail = true, "copies of container disks cost almost nothing"
	}
	return f
}

func kvm() Finding {
	if err := CheckKVM(); err != nil {
		return Finding{Name: "kvm", Detail: err.Error()}
	}
	return Finding{Name: "kvm", OK: true, Detail: "a guest ran"}
}
