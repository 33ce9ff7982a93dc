package debian

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// leftovers are what a build leaves that an image should not have: caches,
// logs, the machine's own settings, and the marker that keeps pip from
// installing into the system's Python.
var leftovers = []string{
	"var/cache/apt/*", "var/cache/debconf/*-old", "var/cache/ldconfig/*", "var/lib/apt/lists/*", "var/lib/dpkg/*-old",
	"var/log/*.log", "var/log/apt/*", "tmp/*", "tmp/.[!.]*", "var/tmp/*", "run/*", "dev/*", "etc/.pwd.lock",
	"etc/dpkg/dpkg.cfg.d/99mmdebstrap",
	"usr/lib/python3*/EXTERNALLY-MANAGED",
}

// files are set: a machine's identity is a sandbox's own, and none of the
// machine that built the image is left.
var files = map[string]string{
	"etc/machine-id":  "",
	"etc/hostname":    "localhost\n",
	"etc/resolv.conf": "",
	"etc/hosts":       "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
}

// aptConf is where mmdebstrap leaves the settings it was given.
const aptConf = "etc/apt/apt.conf.d/99mmdebstrap"

// finish makes an image's tree of what mmdebstrap left.
func finish(tree string, now time.Time) error {
	for _, pattern := range leftovers {
		found, err := filepath.Glob(filepath.Join(tree, pattern))
		if err != nil {
			return fmt.Errorf("clean the tree: %w", err)
		}
		for _, name := range found {
			if err := os.RemoveAll(name); err != nil {
				return fmt.Errorf("clean the tree: %w", err)
			}
		}
	}
	for name, content := range files {
		if err := replaceFile(filepath.Join(tree, name), content); err != nil {
			return fmt.Errorf("finish the tree: %w", err)
		}
	}
	if err := finishApt(tree); err != nil {
		return fmt.Errorf("finish the tree: %w", err)
	}
	return clampTimes(tree, now)
}

// replaceFile writes a file anew; it may have been a link.
func replaceFile(name, content string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		return err
	}
	return os.Chmod(name, 0o644)
}

// finishApt keeps of apt's settings what an old clock or mirror needs, and not
// the machine's proxies, which may hold passwords.
func finishApt(tree string) error {
	b, err := os.ReadFile(filepath.Join(tree, aptConf))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.RemoveAll(filepath.Join(tree, aptConf)); err != nil {
		return err
	}
	keep := filterAptConf(string(b), []string{"Acquire::Check-"})
	if len(keep) > 0 {
		if err := replaceFile(filepath.Join(tree, "etc/apt/apt.conf.d/90check"), string(keep)); err != nil {
			return err
		}
	}
	lists, err := filepath.Glob(filepath.Join(tree, "etc/apt/sources.list.d/*debian.sources"))
	if err != nil || len(lists) != 1 {
		return err
	}
	return os.Rename(lists[0], filepath.Join(tree, "etc/apt/sources.list.d/debian.sources"))
}

// clampTimes gives what the build made the time of the newest package file.
func clampTimes(tree string, now time.Time) error {
	var newest time.Time
	var made []string
	err := filepath.WalkDir(tree, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch t := info.ModTime(); {
		case !t.Before(now):
			made = append(made, name)
		case !d.IsDir() && t.After(newest) && strings.HasPrefix(name, filepath.Join(tree, "usr")):
			newest = t
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("set the times of the tree: %w", err)
	}
	ts, err := unix.TimeToTimespec(newest)
	if err != nil {
		ts = unix.Timespec{}
	}
	for _, name := range made {
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("set the time of %s: %w", name, err)
		}
	}
	return nil
}
