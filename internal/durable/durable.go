// Package durable makes what was written to files safe against a power cut. It
// writes nothing itself, and leaves open the order in which that has to be.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"
)

// syncs is how many files are synced at once: the file system writes its
// journal once for all that wait.
const syncs = 8

// Path makes a file's content, or the names in a directory, safe.
func Path(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("sync to the disk: %w", err)
	}
	return errors.Join(f.Sync(), f.Close())
}

// Tree is Path for a directory and all files and directories below it.
func Tree(dir string) error {
	var g errgroup.Group
	g.SetLimit(syncs)
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() || e.Type().IsRegular() {
			g.Go(func() error { return Path(name) })
		}
		return nil
	})
	if err := errors.Join(err, g.Wait()); err != nil {
		return fmt.Errorf("sync the files in %s to the disk: %w", dir, err)
	}
	return nil
}
