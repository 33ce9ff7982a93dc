package apiserver

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// imageRPC is ImageService in terms of Server.
type imageRPC struct{ s *Server }

var _ opendsecv1connect.ImageServiceHandler = imageRPC{}

type progressStream = connect.ServerStream[opendsecv1.ImportImageResponse]

func (h imageRPC) ImportImage(ctx context.Context, req *connect.Request[opendsecv1.ImportImageRequest], out *progressStream) error {
	name, err := h.s.admitImport(ctx, req.Msg.GetSource(), req.Msg.GetName())
	if err != nil {
		return err
	}
	address, err := h.s.imageNode(ctx)
	if err != nil {
		return err
	}
	in, err := h.s.edges.at(address).ImportImage(ctx, connect.NewRequest(&edgev1.ImportImageRequest{Request: req.Msg}))
	if err != nil {
		return fault.FromConnect(err)
	}
	return h.relay(ctx, name, req.Msg.GetSource(), in, out)
}

func (h imageRPC) BootstrapImage(ctx context.Context, req *connect.Request[opendsecv1.BootstrapImageRequest], out *progressStream) error {
	name, err := h.s.admitBootstrap(ctx, req.Msg.GetDistribution(), req.Msg.GetName())
	if err != nil {
		return err
	}
	address, err := h.s.imageNode(ctx)
	if err != nil {
		return err
	}
	in, err := h.s.edges.at(address).BootstrapImage(ctx, connect.NewRequest(&edgev1.BootstrapImageRequest{Request: req.Msg}))
	if err != nil {
		return fault.FromConnect(err)
	}
	return h.relay(ctx, name, "bootstrap:"+req.Msg.GetDistribution(), in, out)
}

// relay passes a node's progress on, and gives the image its name before its
// caller hears that it is there.
func (h imageRPC) relay(ctx context.Context, name sandbox.ImageName, source string, in *connect.ServerStreamForClient[edgev1.ImportImageResponse], out *progressStream) error {
	defer in.Close() //nolint:errcheck // it has been read to its end, or nobody wants the rest
	var done *opendsecv1.ImportImageResponse
	for in.Receive() {
		p := in.Msg().GetProgress()
		if p.GetImage() != nil {
			done = p
			continue
		}
		if err := out.Send(p); err != nil {
			return err
		}
	}
	if err := in.Err(); err != nil {
		return fault.FromConnect(err)
	}
	if done.GetImage().GetDigest() == "" {
		return fault.New(fault.Unavailable, "the node ended the import of %s without an image: try again", name)
	}
	record, err := imageFromNode(done.GetImage(), name, source, h.s.deps.Now().UTC())
	if err != nil {
		return err
	}
	if err := h.s.nameImage(ctx, record); err != nil {
		return err
	}
	if done.Image, err = imageToProto(record); err != nil {
		return err
	}
	return out.Send(done)
}

func (h imageRPC) ListImages(ctx context.Context, req *connect.Request[opendsecv1.ListImagesRequest]) (*connect.Response[opendsecv1.ListImagesResponse], error) {
	images, err := h.s.listImages(ctx, req.Msg.GetProject())
	if err != nil {
		return nil, err
	}
	out := &opendsecv1.ListImagesResponse{}
	for _, m := range images {
		p, err := imageToProto(m)
		if err != nil {
			return nil, err
		}
		out.Images = append(out.Images, p)
	}
	return connect.NewResponse(out), nil
}

func (h imageRPC) GetImage(ctx context.Context, req *connect.Request[opendsecv1.GetImageRequest]) (*connect.Response[opendsecv1.GetImageResponse], error) {
	m, err := h.s.visibleImage(ctx, req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	p, err := imageToProto(m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GetImageResponse{Image: p}), nil
}

func (h imageRPC) TagImage(ctx context.Context, req *connect.Request[opendsecv1.TagImageRequest]) (*connect.Response[opendsecv1.TagImageResponse], error) {
	m, err := h.s.tagImage(ctx, req.Msg.GetName(), req.Msg.GetNewName())
	if err != nil {
		return nil, err
	}
	p, err := imageToProto(m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.TagImageResponse{Image: p}), nil
}

func (h imageRPC) DeleteImage(ctx context.Context, req *connect.Request[opendsecv1.DeleteImageRequest]) (*connect.Response[opendsecv1.DeleteImageResponse], error) {
	if err := h.s.deleteImage(ctx, req.Msg.GetName()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.DeleteImageResponse{}), nil
}

// imageFromNode makes a record of what a node says of new content. Where it
// came from is as the node says it, without credentials.
func imageFromNode(p *opendsecv1.Image, name sandbox.ImageName, source string, now time.Time) (store.Image, error) {
	config := p.GetConfig()
	if config == nil {
		config = &opendsecv1.ImageConfig{}
	}
	data, err := protojson.Marshal(config)
	if err != nil {
		return store.Image{}, err
	}
	m := store.Image{
		Name: name, Digest: p.GetDigest(), Kind: p.GetKind(), Size: p.GetSize(), Architecture: p.GetArchitecture(),
		Source: p.GetSource(), Config: data, CreatedAt: now,
	}
	if m.Kind == "" {
		m.Kind = "oci"
	}
	if m.Source == "" {
		m.Source = source
	}
	return m, nil
}

func imageToProto(m store.Image) (*opendsecv1.Image, error) {
	config := &opendsecv1.ImageConfig{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(m.Config, config); err != nil {
		return nil, err
	}
	return &opendsecv1.Image{
		Name: m.Name.String(), Digest: m.Digest, Kind: m.Kind, Size: m.Size, CreatedAt: timeToProto(m.CreatedAt),
		Source: m.Source, Architecture: m.Architecture, Config: config,
	}, nil
}
