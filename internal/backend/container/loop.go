package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// attachTries bounds how often another process may take the free loop device
// that the kernel named before we configured it.
const attachTries = 100

// attachLoop makes a block device of an image file. The kernel detaches the
// device when its last user closes it, so one that outlives us needs no care.
func attachLoop(image *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the loop driver (modprobe loop may help): %w", err)
	}
	defer control.Close()
	for range attachTries {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := openLoop(n)
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{Fd: uint32(image.Fd())}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		copy(config.Info.File_name[:len(config.Info.File_name)-1], image.Name())
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attach %s to %s: %w", image.Name(), dev.Name(), err)
		}
	}
	return nil, fmt.Errorf("attach %s: other programs took each free loop device, %d times", image.Name(), attachTries)
}

// loopMajor is the number of the kernel's loop driver.
const loopMajor = 7

// openLoop opens loop device n. Where /dev is not the kernel's own, as in a
// container, the file of a new device is missing and is made.
func openLoop(n int) (*os.File, error) {
	path := fmt.Sprintf("/dev/loop%d", n)
	dev, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		if err := unix.Mknod(path, unix.S_IFBLK|0o660, int(unix.Mkdev(loopMajor, uint32(n)))); err != nil && err != unix.EEXIST {
			return nil, fmt.Errorf("make %s: %w", path, err)
		}
		dev, err = os.OpenFile(path, os.O_RDWR, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open loop device: %w", err)
	}
	return dev, nil
}

// bypassCache lets a loop device read and write its file past the host's page
// cache, so that no page of a sandbox is in memory twice. It waits for what is
// in the cache of the file to be written, and where the file's file system
// cannot do it nothing changes.
func bypassCache(path string) error {
	dev, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open loop device: %w", err)
	}
	defer dev.Close()
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_DIRECT_IO, 1); err != nil && err != unix.EINVAL {
		return fmt.Errorf("bypass the page cache on %s: %w", path, err)
	}
	return nil
}

// loopDevices returns the loop devices of this host and the files behind them.
// A file that was deleted has " (deleted)" at its end.
func loopDevices() (map[string]string, error) {
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	devices := map[string]string{}
	for _, p := range found {
		dev := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(p)))
		file, err := backingFile(dev)
		if err != nil {
			continue // detached since the listing
		}
		devices[dev] = file
	}
	return devices, nil
}

// backingFile returns the file behind a loop device.
func backingFile(dev string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(dev), "loop/backing_file"))
	return strings.TrimSuffix(string(b), "\n"), err
}

// detachLoop frees a loop device, at once or when its last user closes it.
func detachLoop(path string) error {
	dev, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("detach loop device: %w", err)
	}
	defer dev.Close()
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0); err != nil && err != unix.ENXIO {
		return fmt.Errorf("detach %s: %w", path, err)
	}
	return nil
}
