// Package source opens an image where it is: in a registry, in an archive of
// "docker save", or in an OCI layout (a directory or a tar of one). It finds
// the image for the wanted architecture through nested indexes, checks the
// digests of indexes, manifest and configuration, and hands out the layers'
// blobs, whose digests the reader checks with Verify as it reads. It stores
// nothing and unpacks nothing.
package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/kernflux/opendsec/internal/fault"
)

// Options says how to reach an image.
type Options struct {
	Architecture string // "" means "amd64"
	Username     string // login at the registry; "" takes that of ~/.docker/config.json, if any
	Password     string
	CA           []byte              // PEM of authorities to trust besides the machine's own
	PlainHTTP    bool                // allow plain HTTP; on loopback it always is
	Mirrors      map[string][]string // registry host to hosts ("host[:port][/prefix]") asked before it, in order
	Seconds      int                 // to wait for a registry's first answer; 0 means 5
	TempDir      string              // for the copy of a compressed archive; "" means the system's
}

// An Image is an opened image. Digests of everything but the layers are checked.
type Image struct {
	Digest string // of the manifest; of the configuration for an archive that has no manifest
	Config *v1.ConfigFile
	Layers []Layer // the lowest first
	close  func() error
}

// Close lets go of the archive.
func (i *Image) Close() error {
	if i.close == nil {
		return nil
	}
	return i.close()
}

// Size returns the size of all blobs in bytes.
func (i *Image) Size() int64 {
	var n int64
	for _, l := range i.Layers {
		n += l.Size
	}
	return n
}

// A Layer is one layer of an image.
type Layer struct {
	Digest string // of the blob as it is stored; "" where the archive has none
	DiffID string // of the uncompressed tar
	Size   int64  // of the blob in bytes
	Remote bool   // Open reads from the network, so a copy is worth keeping
	Open   func(context.Context) (io.ReadCloser, error)
}

// Kinds of source besides a registry's reference.
const (
	dockerArchive = "docker-archive:"
	ociLayout     = "oci:"
	ociArchive    = "oci-archive:"
)

// Open opens the image that ref names: "docker-archive:PATH[:TAG]",
// "oci:PATH[:TAG]", "oci-archive:PATH[:TAG]", or a registry's reference.
// What is wrong with ref or the image is a fault.InvalidArgument for "source".
func Open(ctx context.Context, ref string, o Options) (*Image, error) {
	if o.Architecture == "" {
		o.Architecture = "amd64"
	}
	if o.Seconds == 0 {
		o.Seconds = 5
	}
	switch {
	case ref == "":
		return nil, fault.Invalid("source", "source is empty; give a registry reference, docker-archive:PATH, oci:PATH or oci-archive:PATH")
	case strings.HasPrefix(ref, dockerArchive):
		file, tag, err := splitPath(strings.TrimPrefix(ref, dockerArchive))
		if err != nil {
			return nil, err
		}
		return openDockerArchive(file, tag, o)
	case strings.HasPrefix(ref, ociLayout):
		dir, tag, err := splitPath(strings.TrimPrefix(ref, ociLayout))
		if err != nil {
			return nil, err
		}
		files, err := openDir(dir)
		if err != nil {
			return nil, err
		}
		return openLayout(ctx, files, tag, o)
	case strings.HasPrefix(ref, ociArchive):
		file, tag, err := splitPath(strings.TrimPrefix(ref, ociArchive))
		if err != nil {
			return nil, err
		}
		files, err := openTar(file, o.TempDir)
		if err != nil {
			return nil, err
		}
		return openLayout(ctx, files, tag, o)
	}
	return openRegistry(ctx, ref, o)
}

// splitPath splits "PATH[:TAG]". Both may hold colons: the longest part that
// exists is the path.
func splitPath(s string) (file, tag string, err error) {
	if s == "" {
		return "", "", fault.Invalid("source", "source names no file")
	}
	for cut := len(s); cut > 0; cut = strings.LastIndexByte(s[:cut], ':') {
		_, err := os.Stat(s[:cut])
		if err == nil {
			return s[:cut], strings.TrimPrefix(s[cut:], ":"), nil
		}
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrInvalid) && !strings.Contains(s[:cut], ":") {
			return "", "", fault.Invalid("source", "open the source: %w", err)
		}
	}
	return "", "", fault.Invalid("source", "there is no file %q on the node", s)
}

// complete checks that manifest, configuration and wish fit together.
func (i *Image) complete(o Options) (*Image, error) {
	c := i.Config
	if arch := orDefault(c.Architecture, "amd64"); arch != o.Architecture || orDefault(c.OS, "linux") != "linux" {
		return nil, fault.Invalid("source", "the image is for %s/%s, wanted is linux/%s", orDefault(c.OS, "linux"), arch, o.Architecture)
	}
	if len(c.RootFS.DiffIDs) != len(i.Layers) {
		return nil, fault.Invalid("source", "the image's configuration names %d layers and its manifest %d; it is no container image or is damaged",
			len(c.RootFS.DiffIDs), len(i.Layers))
	}
	var total int64
	for n := range i.Layers {
		l := &i.Layers[n]
		l.DiffID = c.RootFS.DiffIDs[n].String()
		if total += l.Size; l.Size < 0 || total < 0 {
			return nil, fault.Invalid("source", "layer %d of the image claims an impossible size of %d bytes", n+1, l.Size)
		}
	}
	return i, nil
}

func orDefault(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// maxDocument bounds indexes, manifests and configurations.
const maxDocument = 16 << 20

// readDocument reads a small file whole.
func readDocument(r io.Reader, what string) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxDocument+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	if len(b) > maxDocument {
		return nil, fault.Invalid("source", "%s is larger than %d bytes", what, maxDocument)
	}
	return b, nil
}
