package edge

import (
	"context"
	"sync"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image"
)

// Images is what an edge asks of the image store.
type Images interface {
	ImageUser
	ImageMaker
}

// ImageUser is what sandboxes need of it.
type ImageUser interface {
	// Acquire makes an image's tree usable until Release.
	Acquire(ctx context.Context, digest string) (backend.Rootfs, image.Artifact, error)
	Release(digest string)
	Get(digest string) (image.Artifact, error)
	// Dir returns the path of an image's directory, whether it is there or not.
	Dir(digest string) (string, error)
	List() ([]image.Artifact, error)
	// Begin makes a place for an image of a sandbox's state.
	Begin() (*image.Draft, error)
	Pack(ctx context.Context, o image.PackOptions) (image.Artifact, error)
	// Sweep removes what was deleted in an earlier run and is not in use.
	Sweep() error
}

// ImageMaker is what admins need of it.
type ImageMaker interface {
	Import(ctx context.Context, o image.ImportOptions, report func(image.Progress)) (image.Artifact, error)
	Bootstrap(ctx context.Context, o image.BootstrapOptions, report func(image.Progress)) (image.Artifact, error)
	Delete(digest string) error
}

func (s service) ImportImage(ctx context.Context, req *connect.Request[edgev1.ImportImageRequest], stream *connect.ServerStream[edgev1.ImportImageResponse]) error {
	p := req.Msg.GetRequest()
	if p.GetSource() == "" {
		return fault.Invalid("source", "the image's source is missing: name a registry reference, such as docker.io/library/python:3.12, or docker-archive:PATH")
	}
	return s.e.makeImage(ctx, stream.Send, func(ctx context.Context, report func(image.Progress)) (image.Artifact, error) {
		return s.e.deps.Images.Import(ctx, image.ImportOptions{
			Source: p.GetSource(), Architecture: p.GetArchitecture(),
			Username: p.GetAuth().GetUsername(), Password: p.GetAuth().GetPassword(),
			CA: p.GetCaPem(), PlainHTTP: p.GetInsecure(), Mirrors: s.e.cfg.Mirrors,
		}, report)
	})
}

func (s service) BootstrapImage(ctx context.Context, req *connect.Request[edgev1.BootstrapImageRequest], stream *connect.ServerStream[edgev1.ImportImageResponse]) error {
	p := req.Msg.GetRequest()
	return s.e.makeImage(ctx, stream.Send, func(ctx context.Context, report func(image.Progress)) (image.Artifact, error) {
		return s.e.deps.Images.Bootstrap(ctx, image.BootstrapOptions{
			Distribution: p.GetDistribution(), Packages: p.GetPackages(),
		}, report)
	})
}

func (s service) DeleteImage(_ context.Context, req *connect.Request[edgev1.DeleteImageRequest]) (*connect.Response[edgev1.DeleteImageResponse], error) {
	if err := s.e.deleteImage(req.Msg.GetDigest()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.DeleteImageResponse{}), nil
}

// holder is a backend that holds machines of an image ready, which keep the
// files of its directory on the disk.
type holder interface{ Forget(dir string) }

// deleteImage removes an image, in whatever condition it is, and what backends
// hold ready of it.
func (e *Edge) deleteImage(digest string) error {
	dir, err := e.deps.Images.Dir(digest)
	if err != nil {
		return err
	}
	// First, so that nothing is made of it again.
	if err := e.deps.Images.Delete(digest); err != nil {
		return err
	}
	for _, b := range e.deps.Backends {
		if h, ok := b.(holder); ok {
			h.Forget(dir)
		}
	}
	return nil
}

// makeImage runs work, which ends with the caller or the edge, and sends its
// progress. A slow caller gets fewer reports, and does not slow the work.
func (e *Edge) makeImage(ctx context.Context, send func(*edgev1.ImportImageResponse) error,
	work func(context.Context, func(image.Progress)) (image.Artifact, error),
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(e.run, func() { cancel(errEdgeStops) })()

	latest := make(chan image.Progress, 1)
	var art image.Artifact
	var failed error
	var working sync.WaitGroup
	working.Go(func() {
		defer close(latest)
		art, failed = work(ctx, func(p image.Progress) { replace(latest, p) })
	})
	defer working.Wait()
	for p := range latest {
		if err := send(progressToProto(p)); err != nil {
			cancel(err)
			return err
		}
	}
	if failed != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return failed
	}
	done := progressToProto(image.Progress{Step: "done", Detail: art.Digest, Done: art.Size, Total: art.Size})
	done.Progress.Image = imageToProto(art)
	return send(done)
}

// replace puts p into a channel of one, in place of what is there. Only one
// goroutine sends.
func replace(latest chan image.Progress, p image.Progress) {
	for {
		select {
		case latest <- p:
			return
		default:
		}
		select {
		case <-latest:
		default:
		}
	}
}

func progressToProto(p image.Progress) *edgev1.ImportImageResponse {
	return &edgev1.ImportImageResponse{Progress: &opendsecv1.ImportImageResponse{
		Step: p.Step, Detail: p.Detail, Done: p.Done, Total: p.Total,
	}}
}

func imageToProto(a image.Artifact) *opendsecv1.Image {
	p := &opendsecv1.Image{
		Digest: a.Digest, Kind: a.Kind, Size: a.Size, Source: a.Source, Architecture: a.Architecture,
		Config: &opendsecv1.ImageConfig{
			Env: a.Config.Env, User: a.Config.User, Workdir: a.Config.Workdir,
			Entrypoint: a.Config.Entrypoint, Cmd: a.Config.Cmd, Labels: a.Config.Labels,
		},
	}
	if a.Memory != nil {
		p.Snapshot = snapshotToProto(a.Memory.Snapshot)
	}
	return p
}

func snapshotToProto(s backend.Snapshot) *opendsecv1.SnapshotInfo {
	return &opendsecv1.SnapshotInfo{
		Backend: string(s.Backend), Virtualization: s.Stamp.Virtualization, Runtime: s.Stamp.Runtime, Kernel: s.Stamp.Kernel,
		CpuFeatures: s.Stamp.CPUFeatures, Agent: s.Stamp.Agent, CpuCoresLimit: s.Limits.CPU, MemoryLimitMb: s.Limits.MemoryMB,
		DiskLimitMb: s.Limits.DiskMB, PidsLimit: s.Limits.PIDs,
	}
}
